"""Pure: how long the ranks take for a micro-batch -> how many of a step each is dealt, and from which step on.

Only who runs a micro-batch changes, never which there are: the update is that of any other deal, up to rounding.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import statistics
from collections.abc import Sequence

from elastic.training.batching import deal

_WORTHWHILE = 0.95  # of the predicted time of a step; less is noise, and no reason to deal anew
_NOISE_SECONDS = 0.01  # so much a busy host makes of ranks that are equal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The shares of all ranks. `seconds`: what a micro-batch costs each of them; empty: they count as equal."""

    world_size: int
    seconds: tuple[float, ...] = ()

    def bounds(self, micro_batches: int, rank: int) -> tuple[int, int]:
        """The contiguous range that is dealt to `rank`."""
        if not self.seconds:
            return deal(micro_batches, rank, self.world_size)
        before = list(itertools.accumulate(counts_by_speed(micro_batches, self.seconds), initial=0))
        return before[rank], before[rank + 1]

    def counts(self, micro_batches: int) -> list[int]:
        """How many each rank gets."""
        bounds = (self.bounds(micro_batches, rank) for rank in range(self.world_size))
        return [stop - start for start, stop in bounds]


@functools.lru_cache(maxsize=16)
def counts_by_speed(micro_batches: int, seconds: tuple[float, ...]) -> tuple[int, ...]:
    """How many each rank gets, so that the last one is ready as early as can be; each gets one if there are enough.

    One without any would run one all the same, only that it would not count.
    """
    counts = [int(micro_batches >= len(seconds))] * len(seconds)
    ready = [((count + 1) * cost, rank) for rank, (count, cost) in enumerate(zip(counts, seconds, strict=True))]
    heapq.heapify(ready)
    for _ in range(micro_batches - sum(counts)):
        _, rank = ready[0]
        counts[rank] += 1
        heapq.heapreplace(ready, ((counts[rank] + 1) * seconds[rank], rank))
    return tuple(counts)


def step_seconds(dealt: Deal, seconds: Sequence[float], micro_batches: int) -> float:
    """How long a step takes: as long as its slowest rank."""
    return max(count * cost for count, cost in zip(dealt.counts(micro_batches), seconds, strict=True))


def better_deal(dealt: Deal, seconds: Sequence[float], micro_batches: int) -> Deal:
    """The deal for ranks of this speed, or `dealt` itself where another would gain little."""
    new = dataclasses.replace(dealt, seconds=tuple(seconds))
    gain = step_seconds(new, seconds, micro_batches) / step_seconds(dealt, seconds, micro_batches)
    return new if gain < _WORTHWHILE else dealt


def slowdowns(seconds: Sequence[float]) -> list[float]:
    """Each rank's time over the median; of an even number of ranks the faster one in the middle counts."""
    median = statistics.median_low(seconds)
    return [value / median for value in seconds]


def slow_ranks(seconds: Sequence[float], factor: float) -> frozenset[int]:
    """Those whose micro-batch takes `factor` times the median, and noticeably longer at all than the median's."""
    median = statistics.median_low(seconds)
    ratios = slowdowns(seconds)
    return frozenset(r for r, ratio in enumerate(ratios) if ratio >= factor and seconds[r] - median > _NOISE_SECONDS)


class Schedule:
    """Which deal holds for which step. Asked by the loader, far ahead of training, and by training itself."""

    def __init__(self, first: Deal) -> None:
        self._first_steps, self._deals = [0], [first]
        self._asked = 0

    @property
    def newest(self) -> Deal:
        return self._deals[-1]

    def at(self, step: int) -> Deal:
        """What holds for `step`; from now on it stands."""
        self._asked = max(self._asked, step)
        return self._deals[bisect.bisect_right(self._first_steps, step) - 1]

    def change(self, new: Deal, *, from_step: int) -> None:
        """Deal anew from that step on; all ranks call it with the same.

        Raises:
            RuntimeError: somebody was told otherwise already, so that samples would be lost or run twice.
        """
        if from_step <= max(self._asked, self._first_steps[-1]):
            raise RuntimeError(f"step {from_step} is dealt already: step {self._asked} has been asked for")
        self._first_steps.append(from_step)
        self._deals.append(new)
