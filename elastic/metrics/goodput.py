"""Goodput: the share of wall time since the job began that went into steps that counted, and where the rest went.

Pure. A node accounts for its own time; where nodes run in step they agree. A step that is run again counts as repeated
the second time, so that what a restart has cost shows when it is being made good.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from elastic.metrics.measured import TIME_KINDS
from elastic.progress import Progress
from elastic.status import JobStatus

_STATE_KINDS = {
    "joining": "rendezvous",
    "stopped": "rendezvous",
    "waiting": "waiting",
    "spare": "waiting",
    "starting": "start",
    "running": "steps",
    "draining": "drain",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds by TIME_KINDS."""

    seconds: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIME_KINDS, 0.0))

    @property
    def ratio(self) -> float:
        """NaN before any time has passed."""
        total = math.fsum(self.seconds.values())
        return self.seconds["steps"] / total if total > 0 else math.nan

    def spent(self, parts: Mapping[str, float]) -> Account:
        """With some more seconds."""
        return Account(seconds={kind: seconds + parts.get(kind, 0.0) for kind, seconds in self.seconds.items()})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the account must know of a moment (CLOCK_MONOTONIC). `worker`: the slowest local one that has reported."""

    time: float
    status: JobStatus
    worker: Progress | None = None


def split(before: Seen, now: Seen, *, record_step: int) -> dict[str, float]:
    """Where the seconds between two looks went. `record_step`: the highest step of any round before the current one."""
    elapsed = max(0.0, now.time - before.time)
    state = before.status.state
    if state == "closed":
        return {}
    worker = now.worker
    if state not in ("starting", "running") or worker is None or worker.round != now.status.round:
        return {_STATE_KINDS[state]: elapsed}
    restore_end = worker.restore_ended_at or now.time
    restore = _overlap(before.time, now.time, worker.restore_began_at or restore_end, restore_end)
    start = _overlap(before.time, now.time, before.time, worker.first_step_at or now.time) - restore
    stepping = max(0.0, elapsed - restore - start)
    same = before.worker if before.worker is not None and before.worker.pid == worker.pid else Progress()
    stalled = worker.checkpoint_stall_seconds_total - same.checkpoint_stall_seconds_total
    saving = min(stepping, max(0.0, stalled))
    again = (stepping - saving) * _share_again(same, worker, record_step)
    return {
        "restore": restore,
        "start": max(0.0, start),
        "checkpoint": saving,
        "repeated": again,
        "steps": stepping - saving - again,
    }


def _overlap(began: float, ended: float, since: float, until: float) -> float:
    return max(0.0, min(ended, until) - max(began, since))


def _share_again(before: Progress, now: Progress, record_step: int) -> float:
    """How much of the steps between two reports of a worker had been run before."""
    first = max(before.step, now.base_step)
    if now.step <= first:
        return 1.0 if now.step < record_step else 0.0  # in the middle of one
    return min(1.0, max(0.0, (record_step - first) / (now.step - first)))


class Goodput:
    """The account as the agent's loop keeps it. Other threads may read it."""

    def __init__(self, before_us: Account, *, down_seconds: float) -> None:
        """`before_us`: what the agents before this one have left; `down_seconds`: how long there was none since."""
        self._before_us = before_us
        self._ours = Account().spent({"down": down_seconds})
        self._last: Seen | None = None
        self._round, self._record_step, self._highest_step = 0, -1, -1

    def note(self, now: Seen) -> None:
        """Called in each pass of the loop."""
        if now.status.round != self._round:
            self._record_step = max(self._record_step, self._highest_step)
            self._round = now.status.round
        if self._last is not None:
            self._ours = self._ours.spent(split(self._last, now, record_step=self._record_step))
        self._last = now
        if now.worker is not None and now.worker.in_loop:
            self._highest_step = max(self._highest_step, now.worker.step)

    @property
    def whole(self) -> Account:
        """Of the whole job, as far as it is remembered."""
        return self._before_us.spent(self._ours.seconds)

    @property
    def ours(self) -> Account:
        """Since this agent began, with what was found missing then."""
        return self._ours

    @property
    def is_closed(self) -> bool:
        """Whether the job has ended here in an orderly way."""
        return self._last is not None and (self._last.status.state == "closed" or self._last.status.outcome is not None)
