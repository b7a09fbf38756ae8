"""Checkpoints in memory: what they cost a step, and how fast they come back. `python -m tests.bench.bench_memory`.

Two ranks of one node. Stall and restore are medians of the slower rank's wall time, each beside a plain copy of the
same bytes in the same repeat. Step time is that of a Trainer whose blocks of steps alternate between memory checkpoints
at the automatic interval and none.
"""

from __future__ import annotations

import argparse
import operator
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier
from elastic.training.trainer import AppliedStep, Trainer, TrainerConfig
from tests.bench.bench_checkpoints import Times, make_state, timed
from tests.bench.bench_step import MICRO_BATCH, MICRO_STEPS, RANKS, Measured
from tests.support.ranks import run_ranks
from tests.training.worlds import make_session

GOALS = [
    ("keep, beside training", "overlapped", "copy into a warm buffer", "copy", 1.5),  # as the Trainer does
    ("keep, in one piece", "stall", "copy into a warm buffer", "copy", 1.5),
    ("restore from memory", "restore", "copy into fresh memory", "clone", 1.5),
]
NEVER = 1 << 60
SMALL_MEGABYTES, MORE = 100, 5  # of a state below that more repeats are made: each takes but a moment


def small_state(megabytes: int) -> dict[str, Any]:
    """Three copies of a model of 40 tensors, as Adam keeps them."""
    elements = megabytes * 250_000 // 120
    return {kind: {f"{i}": torch.randn(elements) for i in range(40)} for kind in ("model", "exp_avg", "exp_avg_sq")}


def measure(rank: int, world_size: int, store: dist.Store, folder: Path, megabytes: int, repeats: int) -> Times:
    torch.manual_seed(0)
    state = make_state(megabytes) if megabytes > SMALL_MEGABYTES else small_state(megabytes)
    times: Times = {}
    tier = MemoryTier(folder, local_rank=rank, local_world_size=world_size)
    manager = CheckpointManager(None, rank=rank, world_size=world_size, store=store, memory=tier)
    manager.restore(state)
    tensors = [tensor for part in state.values() for tensor in part.values()]
    share = torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8).chunk(world_size)[rank].clone()
    warm = torch.zeros_like(share)
    for step in range(1, repeats + 2):
        timed(times, "copy", lambda: warm.copy_(share))
        timed(times, "stall", lambda: manager.keep(2 * step, state))  # noqa: B023
        timed(times, "seal", manager.settle)
        timed(times, "overlapped", lambda: manager.keep(2 * step + 1, state, steady=tensors))  # noqa: B023
        timed(times, "rest of it", manager.settle)
        timed(times, "clone", lambda: [tensor.clone() for tensor in tensors])
        restored = timed(times, "restore", lambda: manager.restore(state))
        assert restored.step == 2 * step + 1
        del restored
    manager.close()
    return times


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of this process with all its threads."""

    wall: float
    processor: float

    @classmethod
    def so_far(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def since(self, begin: Spent, steps: int) -> Spent:
        """Per step."""
        return Spent((self.wall - begin.wall) / steps, (self.processor - begin.processor) / steps)


class Switching(Measured):
    """Memory checkpoints on in every other block of steps."""

    def __init__(self, rank: int, steps: int) -> None:
        super().__init__(rank, steps)
        self.trainer: Trainer | None = None
        self.every: list[int] = []
        self.seconds: dict[bool, list[Spent]] = {False: [], True: []}
        self._on, self._at = True, Spent.so_far()

    def on_step(self, step: AppliedStep) -> None:
        if step.step % self._steps:
            return
        assert self.trainer is not None
        policy = self.trainer._saver._memory_policy
        self.seconds[self._on].append(Spent.so_far().since(self._at, self._steps))
        if self._on:
            self.every.append(policy.every)
        self._on = not self._on
        policy._every = None if self._on else NEVER
        self._at = Spent.so_far()


def train(rank: int, world_size: int, store: Any, folder: str, blocks: int, steps: int) -> tuple[Any, list[int]]:
    session = make_session(rank, world_size, store, memory_dir=folder, memory_rank=rank, local_world_size=world_size)
    config = TrainerConfig(
        global_batch_size=RANKS * MICRO_STEPS * MICRO_BATCH,
        micro_batch_size=MICRO_BATCH,
        steps=2 * (blocks + 1) * steps,
        grad_clip_norm=1.0,
    )
    task = Switching(rank, steps)
    task.trainer = Trainer(task, config, session=session)
    task.trainer.run()
    return task.seconds, task.every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 1056], help="sizes of the whole state")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shared-memory", default="/dev/shm")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="bench-memory-", dir=arguments.shared_memory))
    try:
        for megabytes in arguments.megabytes:
            folder = base / str(megabytes)
            times = run_ranks(
                *(2, measure, folder, megabytes, arguments.repeats * (MORE if megabytes <= SMALL_MEGABYTES else 1)),
                process_group=True,
                timeout_seconds=600,
            )[0]
            shutil.rmtree(folder)
            report(megabytes, times)
        seconds, every = run_ranks(2, train, str(base), arguments.blocks, arguments.steps, timeout_seconds=600)[0]
    finally:
        shutil.rmtree(base)
    pairs = list(zip(seconds[True][1:], seconds[False][1:], strict=False))
    print("\nstep of the Trainer, state of 10 MB in memory against without (goal 1.01)")
    for name in Spent._fields:
        with_it, without = ([getattr(spent, name) for spent in column] for column in zip(*pairs, strict=True))
        ratio = statistics.median(map(operator.truediv, with_it, without))
        spread = statistics.median(abs(value / statistics.median(without) - 1) for value in without)
        print(
            f"  {name:10} {statistics.median(without):.4f} s without, ratio {ratio:.3f}; "
            f"blocks without differ by {100 * spread:.1f} % from each other"
        )
    print(f"  kept every {statistics.median(every):.0f} steps, as the measured cost allows")


def report(megabytes: int, times: Times) -> None:
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first one warms up
    print(f"\n{megabytes} MB, 2 ranks, seconds (least - most)")
    for name, values in times.items():
        print(f"  {name:16} {medians[name]:8.4f}   ({min(values[1:]):.4f} - {max(values[1:]):.4f})")
    for ours, ours_key, other, other_key, goal in GOALS:
        ratio = medians[ours_key] / medians[other_key]
        print(f"  {ours:22} {other:26} {ratio:6.2f}  {goal:5.2f}  {'met' if ratio <= goal else 'missed'}")


if __name__ == "__main__":
    main()
