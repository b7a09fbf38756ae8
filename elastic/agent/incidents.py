"""The story of each recovery: what caused it, how many steps it cost and where its seconds went."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence

from elastic.progress import Progress
from elastic.status import Incident, IncidentSeconds

_KEPT = 50


@dataclasses.dataclass(slots=True, kw_only=True)
class _Open:
    """An incident in the making; CLOCK_MONOTONIC seconds, 0 = not reached."""

    unix_time: float
    cause: str
    applied_step: int
    failed_at: float
    noticed_at: float
    stopped_at: float = 0.0
    decided_at: float = 0.0
    round: int = 0
    is_named: bool = False  # by the round that answered it, or better than it could


class Incidents:
    """Fed by the agent's loop; answers with what `/status` shows, newest last."""

    def __init__(self) -> None:
        self._closed: collections.deque[Incident] = collections.deque(maxlen=_KEPT)
        self._open: _Open | None = None

    def begin(
        self,
        *,
        cause: str,
        applied_step: int,
        failed_at: float,
        now: float,
        reports: Sequence[Progress] = (),
        is_known: bool = False,
    ) -> bool:
        """Something ended the round; while an incident is open, what follows belongs to it. Returns whether none was.

        `is_known`: this node knows the cause better than the next round will, which others name.

        But for workers without a session: nobody can tell when they were back at work, so the next failure is another.
        """
        if self._open is not None and self._open.decided_at and reports and not any(report.pid for report in reports):
            self._closed.append(_describe(self._open, reports))
            self._open = None
        is_new = self._open is None
        if self._open is None:
            self._open = _Open(
                unix_time=time.time(),
                cause=cause,
                applied_step=applied_step,
                failed_at=failed_at,
                noticed_at=now,
                is_named=is_known,
            )
        self._open.stopped_at = self._open.decided_at = 0.0
        return is_new

    def age(self, now: float) -> float:
        """Seconds since the open one began; 0 where there is none."""
        return max(0.0, now - self._open.failed_at) if self._open is not None else 0.0

    def name(self, cause: str) -> None:
        """The cause is known better now."""
        if self._open and not self._open.is_named:
            self._open.cause = cause

    def stopped(self, now: float) -> None:
        """All workers are gone."""
        if self._open and not self._open.stopped_at:
            self._open.stopped_at = now

    def decided(self, round_number: int, now: float, cause: str) -> None:
        """The next round is there and its workers are being started.

        Its cause is the same on every node, and what a node saw itself may only have followed from it: a rank that
        lost its peer fails in its collective. What goes wrong while an incident is open has followed from it as well.
        """
        if self._open:
            self._open.decided_at, self._open.round = now, round_number
            self._open.cause = self._open.cause if self._open.is_named else cause
            self._open.is_named = True

    def observe(self, reports: Sequence[Progress]) -> Incident | None:
        """Close the incident once each local worker has applied a new step; returns it then."""
        current = self._open
        if current is None or not current.decided_at or not reports:
            return None
        if any(report.first_step_at <= current.decided_at for report in reports):
            return None
        incident = _describe(current, reports)
        self._closed.append(incident)
        self._open = None
        return incident

    def all(self, reports: Sequence[Progress]) -> tuple[Incident, ...]:
        """Every incident kept, the open one included as far as it has come."""
        if self._open is None:
            return tuple(self._closed)
        return (*self._closed, _describe(self._open, reports))


def _describe(current: _Open, reports: Sequence[Progress]) -> Incident:
    """Phases are differences of consecutive marks, so that they add up to the total by construction."""
    mark = current.decided_at
    fresh = [report for report in reports if mark and report.pid and report.started_at > mark]
    all_fresh = fresh if fresh and len(fresh) == len(reports) else []
    restore_began, restore_ended, first_step = (
        _last([getattr(report, name) for report in all_fresh])
        for name in ("restore_began_at", "restore_ended_at", "first_step_at")
    )
    marks = [
        current.failed_at,
        current.noticed_at,
        current.stopped_at,
        current.decided_at,
        restore_began,
        restore_ended,
        first_step,
    ]
    seconds = [
        round(after - before, 4) if before and after and after >= before else None
        for before, after in itertools.pairwise(marks)
    ]
    base = max((r.base_step for r in all_fresh if r.in_loop), default=None)
    detect, stop, rendezvous, start, restore, first = seconds
    return Incident(
        time=current.unix_time,
        cause=current.cause,
        round=current.round,
        lost_steps=None if base is None or current.applied_step < 0 else max(0, current.applied_step - base),
        seconds=IncidentSeconds(
            detect=detect,
            stop=stop,
            rendezvous=rendezvous,
            start=start,
            restore=restore,
            first_step=first,
            total=round(first_step - current.failed_at, 4) if first_step else None,
        ),
    )


def _last(times: list[float]) -> float:
    """When the last rank was there; 0 while one is not."""
    return max(times) if times and all(times) else 0.0
