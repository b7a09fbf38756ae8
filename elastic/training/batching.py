"""Pure: global batch, micro-batch and world size -> who runs which micro-batches of a step, and where the next begins.

A global batch is cut into micro-batches of nearly equal size, which are dealt to the ranks contiguously (`deal`, or
`balance` where it goes by speed). The cut does
not depend on the world size, so that a resize changes neither the batches nor the seeds of their micro-batches, only
who runs them. What the offsets mean as items of the dataset is said by `sampler`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far training has come in the data. `samples` counts over all epochs, `offset` within the current one."""

    epoch: int = 0
    offset: int = 0
    samples: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The items [start, stop) of the epoch's order. `start` with the epoch also names it in the seeds."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step: the items of its global batch and the position after it."""

    step: int  # its number, from 1
    epoch: int
    start: int
    stop: int
    micro_batches: tuple[MicroBatch, ...]
    after: Position


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """The rule by which a dataset becomes steps; holds for a whole run, whatever happens to the world size."""

    dataset_size: int
    global_batch_size: int
    micro_batch_size: int
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that begins at its first item; 0 when nothing of the dataset would be used."""
        whole, rest = divmod(self.dataset_size, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def plan(self, position: Position, *, step: int = 1) -> StepPlan:
        """Step number `step`, from `position` on: the rest of an epoch is a smaller step (or dropped), never mixed.

        `position.offset` may be any item, also one that another global batch size left behind.
        """
        epoch, start = position.epoch, position.offset
        if self.dataset_size - start < (self.global_batch_size if self.drop_last else 1):
            epoch, start = epoch + 1, 0
        stop = min(start + self.global_batch_size, self.dataset_size)
        return StepPlan(
            step=step,
            epoch=epoch,
            start=start,
            stop=stop,
            micro_batches=tuple(
                MicroBatch(epoch=epoch, start=start + a, stop=start + b)
                for a, b in cut(stop - start, self.micro_batch_size)
            ),
            after=self._after(epoch, stop, position.samples + stop - start),
        )

    def _after(self, epoch: int, stop: int, samples: int) -> Position:
        """Where the next step begins: at the next epoch's first item as soon as this one has no further step."""
        if self.dataset_size - stop < (self.global_batch_size if self.drop_last else 1):
            return Position(epoch=epoch + 1, offset=0, samples=samples)
        return Position(epoch=epoch, offset=stop, samples=samples)

    def remaining(
        self, position: Position, *, step: int, steps: int | None = None, epochs: int | None = None
    ) -> Iterator[StepPlan]:
        """The steps from `position` on, until `steps` are done or the last epoch is over; `step` are done already."""
        while steps is None or step < steps:
            plan = self.plan(position, step=step + 1)
            if epochs is not None and plan.epoch >= epochs:
                return
            yield plan
            position, step = plan.after, step + 1


def cut(count: int, size: int) -> list[tuple[int, int]]:
    """Bounds of the fewest pieces of at most `size`, whose lengths differ by at most one.

    Even pieces, because a last piece of one item would make BatchNorm raise and waste a whole micro-step.
    """
    pieces = -(-count // size)
    return [(count * i // pieces, count * (i + 1) // pieces) for i in range(pieces)]


def deal(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous range of `count` things that `rank` gets; shares differ by at most one, the first have more."""
    share, extra = divmod(count, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)
