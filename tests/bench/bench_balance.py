"""Step time with one of two ranks slowed down three times: dealt evenly, and by speed.

    python -m tests.bench.bench_balance [--steps N]

Slowed by a sleep in its loss, so that the two cores of a small machine can show it. The update must be the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from typing import Any

import torch

from elastic.training.trainer import AppliedStep, TrainerConfig
from tests.training.test_trainer_equivalence import relative_difference
from tests.training.worlds import Ran, SentenceTask, train

RANKS, MICRO_BATCHES, MICRO_SECONDS, SLOWDOWN = 2, 8, 0.02, 3.0


class Slowed(SentenceTask):
    """`extra` are the times at which steps ended."""

    def __init__(self) -> None:
        super().__init__(size=4096, double=True)
        self.extra: list[float] = []

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        time.sleep(MICRO_SECONDS * (SLOWDOWN if os.environ["RANK"] == str(RANKS - 1) else 1.0))
        return super().loss(model, batch)

    def on_step(self, step: AppliedStep) -> None:
        super().on_step(step)
        self.extra.append(time.perf_counter())


def _step_seconds(run: Ran, steps: int) -> float:
    """The median of the second half: speeds have been compared by then."""
    ends = run.extra[steps // 2 :]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def measure(steps: int) -> dict[str, float]:
    """The same steps both ways, one after the other."""
    runs = {}
    for balance in ("even", "speed"):
        config = TrainerConfig(
            global_batch_size=MICRO_BATCHES * 2,
            micro_batch_size=2,
            steps=steps,
            speed_every=10,
            balance=balance,  # type: ignore[arg-type]  # one of its two values
        )
        runs[balance] = train(RANKS, Slowed(), config, timeout_seconds=300)[0]
    even, speed = (_step_seconds(runs[name], steps) for name in ("even", "speed"))
    return {
        "step_seconds_even": even,
        "step_seconds_by_speed": speed,
        "ratio": speed / even,
        "largest_relative_difference_of_a_parameter": relative_difference(runs["speed"], runs["even"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    print(json.dumps(measure(parser.parse_args().steps), indent=2))


if __name__ == "__main__":
    main()
