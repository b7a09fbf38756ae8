"""The script whose recovery is timed, the same under torchrun and under elasticd: plain DDP, saved by torch.save.

    recovery_script.py FOLDER

Each rank appends one line per step to FOLDER/times: attempt, rank, step, CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 1_000_000
STEP_SECONDS = 0.01


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1600, 1600))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    saved = folder / "state.pt"
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        first = state["step"]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    times = os.open(folder / "times", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(first + 1, STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 1600)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        os.write(times, f"{attempt} {dist.get_rank()} {step} {time.monotonic()}\n".encode())
        if step % 10 == 0:
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            dist.barrier()


if __name__ == "__main__":
    main()
