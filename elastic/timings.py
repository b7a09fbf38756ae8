"""How often something took how long: the histograms that a worker keeps in its progress block, fit for Prometheus.

A histogram is data. The bounds are the same for all, so that histograms of workers, rounds and agents can be added up.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds, each of them included below
_BUCKETS = len(BOUNDS) + 1

STEP_PHASES = ("data", "forward_backward", "comm_exposed", "optimizer", "checkpoint")  # disjoint parts of a step
WORKER_TIMINGS = (*STEP_PHASES, "checkpoint_stall", "checkpoint_write")


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """`counts` by bucket, not cumulative, the last one above every bound; `sum` of the seconds."""

    counts: tuple[int, ...] = (0,) * _BUCKETS
    sum: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observed(self, seconds: float) -> Histogram:
        """This one and one more."""
        counts = list(self.counts)
        counts[bucket_of(seconds)] += 1
        return Histogram(tuple(counts), self.sum + seconds)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)), self.sum + other.sum)

    def since(self, earlier: Histogram) -> Histogram:
        """What was added after `earlier`; all of it when it is no continuation of that."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(counts, self.sum - earlier.sum) if min(counts) >= 0 else self

    def cumulative(self) -> list[int]:
        """How many took at most as long as each bound, and last how many there were."""
        return list(itertools.accumulate(self.counts))


def bucket_of(seconds: float) -> int:
    return bisect.bisect_left(BOUNDS, seconds)


Timings = Mapping[str, Histogram]  # by the names of WORKER_TIMINGS
NO_TIMINGS: Timings = dict.fromkeys(WORKER_TIMINGS, Histogram())

# In a progress block: for each name the counts, then the sums.
FORMAT = f"{len(WORKER_TIMINGS) * _BUCKETS}Q{len(WORKER_TIMINGS)}d"
SCHEMA = f"{','.join(WORKER_TIMINGS)}:{','.join(map(str, BOUNDS))}"


class TimingsWriter:
    """The numbers of `FORMAT` as a worker counts them up, in memory that it is given."""

    def __init__(self, image: memoryview) -> None:
        """`image`: as many bytes as the format has, all zero."""
        self._index = {name: i for i, name in enumerate(WORKER_TIMINGS)}
        counts_bytes = 8 * len(WORKER_TIMINGS) * _BUCKETS
        self._counts, self._sums = image[:counts_bytes].cast("Q"), image[counts_bytes:].cast("d")

    def observe(self, seconds: Mapping[str, float]) -> None:
        """One more of each named. Raises: KeyError for a name that is none of `WORKER_TIMINGS`."""
        for name, value in seconds.items():
            which = self._index[name]
            self._counts[which * _BUCKETS + bucket_of(value)] += 1
            self._sums[which] += value


def from_values(values: Iterable[Any]) -> Timings:
    """The inverse of what a worker packs, without the sequence."""
    numbers = list(values)
    sums = numbers[len(WORKER_TIMINGS) * _BUCKETS :]
    return {
        name: Histogram(tuple(numbers[i * _BUCKETS : (i + 1) * _BUCKETS]), sums[i])
        for i, name in enumerate(WORKER_TIMINGS)
    }
