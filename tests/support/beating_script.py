"""trainer_script.py in a process that also writes down, every few ms, that it lives; and what these beats tell.

    beating_script.py STEPS STEP_SECONDS STATE_FILE [MODE]

A line of STATE_FILE.beats is the time (CLOCK_MONOTONIC, one clock for all processes of the host), the node, the round.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import threading
import time
from pathlib import Path

_PAUSE_SECONDS = 0.005


@dataclasses.dataclass(frozen=True)
class Life:
    """Of the workers of one node in one round: when they were first and last known to live."""

    node: str
    round: int
    first: float
    last: float


def read_lives(state_file: Path) -> list[Life]:
    """In the order of their rounds."""
    times: dict[tuple[int, str], list[float]] = {}
    for line in Path(f"{state_file}.beats").read_text().splitlines():
        time_, node, round_ = line.split()
        times.setdefault((int(round_), node), []).append(float(time_))
    return [Life(node, round_, min(beats), max(beats)) for (round_, node), beats in sorted(times.items())]


def assert_rounds_never_overlap(state_file: Path) -> None:
    """No worker of a round lives any more when the first one of a later round begins."""
    lives = read_lives(state_file)
    late = [(old, new) for old in lives for new in lives if old.round < new.round and old.last >= new.first]
    assert not late, late


def _beat(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    who = f"{os.environ['ELASTICD_NODE_ID']} {os.environ['ELASTICD_ROUND']}"
    while True:
        os.write(file, f"{time.monotonic():.6f} {who}\n".encode())
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    threading.Thread(target=_beat, args=(f"{sys.argv[3]}.beats",), daemon=True).start()
    runpy.run_path(str(Path(__file__).with_name("trainer_script.py")), run_name="__main__")
