"""Counters that outlive the workers that count: each starts at 0, and what was counted before is carried on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from elastic.metrics.measured import WorkerReport, WorkerTotals
from elastic.progress import Progress
from elastic.timings import NO_TIMINGS, Histogram

COUNTERS = tuple(field.name for field in dataclasses.fields(Progress) if field.name.endswith("_total"))


@dataclasses.dataclass(slots=True)
class _Seat:
    """One local rank: what all its workers have counted, and the newest report that is in there."""

    counters: dict[str, float]
    timings: dict[str, Histogram]
    worker: tuple[int, int] = (0, 0)  # round and pid
    last: WorkerReport | None = None


def commit_times(reports: Collection[Progress], before: Mapping[str, float]) -> dict[str, float]:
    """Unix time of the newest commit by tier; 0 = none yet.

    Any rank knows of one to disk. In memory each rank keeps a share: while one keeps nothing, nothing is committed.
    """
    disk = max((report.commit_unix_time for report in reports), default=0.0)
    memory = min((report.memory_unix_time for report in reports), default=0.0)
    return {"disk": max(before["disk"], disk), "memory": max(before["memory"], memory)}


class Totals:
    """Told of reports at each scrape, and of a worker's last one before it is forgotten."""

    def __init__(self, local_world_size: int) -> None:
        self._seats = {
            local_rank: _Seat(dict.fromkeys(COUNTERS, 0), dict(NO_TIMINGS)) for local_rank in range(local_world_size)
        }
        self.commit_times = {"disk": 0.0, "memory": 0.0}
        self.damaged = 0

    def take(self, reports: Iterable[WorkerReport]) -> None:
        """Add what is new. A counter that fell was begun anew, so all of it is new."""
        reports = tuple(reports)
        self.commit_times = commit_times([report.progress for report in reports], self.commit_times)
        for report in reports:
            seat = self._seats.get(report.local_rank)
            if report.is_damaged:
                self.damaged += 1
            if seat is None or report.progress.pid == 0:
                continue
            worker = (report.progress.round, report.progress.pid)
            before = seat.last if seat.worker == worker else None
            seat.worker, seat.last = worker, report
            for name in COUNTERS:
                now: float = getattr(report.progress, name)
                then: float = getattr(before.progress, name) if before is not None else 0
                seat.counters[name] += now - then if now >= then else max(now, 0)
            for name, histogram in report.timings.items():
                earlier = before.timings[name] if before is not None else Histogram()
                seat.timings[name] += histogram.since(earlier)

    def all(self) -> Mapping[int, WorkerTotals]:
        """For each local rank, whether it has a worker now or not."""
        return {
            local_rank: WorkerTotals(counters=dict(seat.counters), timings=dict(seat.timings))
            for local_rank, seat in self._seats.items()
        }
