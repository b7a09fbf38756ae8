"""A worker without torch that speaks the progress block as a training loop would; run by the agent's tests.

    trainer_script.py STEPS STEP_SECONDS STATE_FILE [MODE]

State is one number in STATE_FILE, "committed" on a drain, on a save request and at the end. MODE makes one rank fail.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elastic.progress import ENVIRONMENT_KEY, Outcome, ProgressWriter


def main() -> None:
    steps, step_seconds, state_file = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    mode = sys.argv[4] if len(sys.argv) > 4 else ""
    rank, round_number = int(os.environ["RANK"]), int(os.environ["ELASTICD_ROUND"])
    progress = ProgressWriter(Path(os.environ[ENVIRONMENT_KEY]))
    now = time.monotonic()
    progress.update(pid=os.getpid(), rank=rank, round=round_number, started_at=now, restore_began_at=now)
    base = int(state_file.read_text()) if state_file.exists() else 0
    progress.update(step=base, base_step=base, disk_step=base, in_loop=1, restore_ended_at=time.monotonic())
    if mode == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    saves = 0
    for step in range(base + 1, steps + 1):
        time.sleep(step_seconds)
        if mode == "fatal" and step == 3:
            progress.update(outcome=Outcome.FATAL)
            raise RuntimeError("no use in trying again")
        if mode == "kill-once" and step == 3 and rank == 1 and round_number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        progress.update(step=step)
        if step == base + 1:
            progress.update(first_step_at=time.monotonic())
        if mode == "deaf" or (mode == "until-told" and not state_file.with_suffix(".go").exists()):
            continue
        if progress.saves_requested > saves:
            saves = progress.saves_requested
            commit(state_file, step)
            progress.update(disk_step=step)
        if progress.drain_requested:
            if mode != "drain-unsaved":
                commit(state_file, step)
                progress.update(disk_step=step)
            progress.update(outcome=Outcome.DRAINED)
            return
    if mode != "end-unsaved":
        commit(state_file, steps)
        progress.update(disk_step=steps)
    progress.update(outcome=Outcome.FINISHED)


def commit(path: Path, step: int) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(str(step))
    partial.replace(path)


if __name__ == "__main__":
    main()
