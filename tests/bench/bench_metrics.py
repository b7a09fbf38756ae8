"""What metrics cost: a step with the progress block and without it, and a single report.

    python -m tests.bench.bench_metrics [--blocks N] [--steps N]

Steps with and without alternate in the same two ranks of one Trainer, so that whatever else the machine does hits both;
the ratio is the median of those of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

from elastic import progress
from elastic.progress import Phase, ProgressWriter
from elastic.training.session import Session
from elastic.training.trainer import AppliedStep, Trainer, TrainerConfig
from tests.bench.bench_step import MICRO_BATCH, MICRO_STEPS, RANKS, Measured, Seconds, clocks, since
from tests.support.ranks import run_ranks
from tests.training.worlds import make_session

_RATIO_LIMIT, _REPORT_LIMIT_SECONDS = 1.005, 10e-6
_CALLS, _REPEATS = 5000, 9
_WARM_UP_STEPS = 8


class Switched(Measured):
    """Takes the session's block away and gives it back, block of steps by block of steps."""

    def __init__(self, rank: int, steps: int, session: Session) -> None:
        super().__init__(rank, steps)
        self._session, self._parts = session, (session._progress, session._profiling)
        self.times: dict[bool, list[Seconds]] = {True: [], False: []}
        self._is_on = True

    def on_step(self, step: AppliedStep) -> None:
        if step.step % self._steps:
            return
        if step.step > _WARM_UP_STEPS:
            self.times[self._is_on].append(since(self._began, self._steps))
        self._is_on = not self._is_on
        self._session._progress, self._session._profiling = self._parts if self._is_on else (None, None)
        self._began = clocks()


def _rank(rank: int, world_size: int, store: Any, directory: str, blocks: int, steps: int) -> dict[bool, list[Seconds]]:
    block = Path(directory) / f"progress-{rank}"
    progress.create(block)
    session = make_session(rank, world_size, store, progress_path=str(block))
    task = Switched(rank, steps, session)
    config = TrainerConfig(
        global_batch_size=RANKS * MICRO_STEPS * MICRO_BATCH,
        micro_batch_size=MICRO_BATCH,
        steps=2 * blocks * steps + _WARM_UP_STEPS,
        grad_clip_norm=1.0,
    )
    Trainer(task, config, session=session).run()
    return task.times


def step_cost(blocks: int, steps: int) -> dict[str, float]:
    """Of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        times = run_ranks(RANKS, _rank, directory, blocks, steps, timeout_seconds=600)[0]
    pairs = list(zip(times[True], times[False], strict=False))
    ratios = sorted(on[0] / off[0] for on, off in pairs)
    return {
        "step_seconds_on": statistics.median(on[0] for on, _ in pairs),
        "step_seconds_off": statistics.median(off[0] for _, off in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartile_low": ratios[len(ratios) // 4],
        "ratio_quartile_high": ratios[-1 - len(ratios) // 4],
        "cpu_ratio": statistics.median(on[1] / off[1] for on, off in pairs),
    }


def report_cost() -> dict[str, float]:
    """Seconds of one call, the best of some: what else the machine does is not its cost."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "block"
        progress.create(path)
        writer = ProgressWriter(path)
        names = [name for name in progress._FIELDS if name.endswith(("_total", "_bytes"))][:24]
        step = dict.fromkeys(names, 1)
        phases = {"data": 0.01, "forward_backward": 0.1, "comm_exposed": 0.01, "optimizer": 0.01}
        calls = {
            "report_seconds": lambda: writer.update(step=1, loss=1.0, grad_norm=1.0, learning_rate=0.1, **step),
            "phase_seconds": lambda: writer.update(phase=Phase.DATA, phase_since=1.0, progressed_at=1.0),
            "observe_seconds": lambda: writer.observe(phases),
        }
        return {name: min(timeit.repeat(call, number=_CALLS, repeat=_REPEATS)) / _CALLS for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=150, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="in a block")
    arguments = parser.parse_args()
    figures = {**report_cost(), **step_cost(arguments.blocks, arguments.steps)}
    figures |= {"limit_ratio": _RATIO_LIMIT, "limit_report_seconds": _REPORT_LIMIT_SECONDS}
    print(json.dumps(figures, indent=2))
    sys.exit(figures["ratio"] > _RATIO_LIMIT or figures["report_seconds"] > _REPORT_LIMIT_SECONDS)


if __name__ == "__main__":
    main()
