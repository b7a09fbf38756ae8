"""The script whose recovery is timed, the same under torchrun and under elasticd: plain DDP, saved by torch.save.

    recovery_script.py FOLDER MEGABYTES [session]

Each rank appends one line per step to FOLDER/times: attempt, rank, step, CLOCK_MONOTONIC seconds, world size. With
`session` it also tells the agent where it is, so that the incident has all its phases.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 1_000_000
STEP_SECONDS = 0.01
SAVE_EVERY = 10


def main() -> None:
    folder, megabytes = Path(sys.argv[1]), float(sys.argv[2])
    session: Any = None
    restoring: Any = contextlib.nullcontext()
    if "session" in sys.argv:
        import elastic
        from elastic.progress import Phase

        session = elastic.session()
        restoring = session.phase(Phase.RESTORE)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    width = int((megabytes * 1e6 / 4) ** 0.5)
    network = torch.nn.Linear(width, width)
    saved = folder / "state.pt"
    first = 0
    with restoring:
        if saved.exists():
            state = torch.load(saved, mmap=True)
            network.load_state_dict(state["model"])
            first = state["step"]
    if session:
        session.enter_loop(step=first, base_step=first)
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    times = os.open(folder / "times", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(first + 1, STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        if session:
            session.report(step=step)
        os.write(times, f"{attempt} {dist.get_rank()} {step} {time.monotonic()} {dist.get_world_size()}\n".encode())
        if step % SAVE_EVERY == 0:
            if dist.get_rank() == 0:
                torch.save({"model": network.state_dict(), "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            dist.barrier()


if __name__ == "__main__":
    main()
