"""What happens to the job, counted from one status after another: restarts by reason, lost steps, recovery times."""

from __future__ import annotations

import re

from elastic.metrics.measured import REASONS, RECOVERY_PHASES, Example, JobTotals
from elastic.status import JobStatus
from elastic.timings import Histogram

# The words of a round's cause, as rendezvous and agent put them, in the order in which they decide.
_SIGNS = (
    ("hung", r"^(rank|node) .*\bhung\b"),
    ("out_of_memory", r"^(rank|node) \S+( on \S+)? out of memory|OutOfMemoryError|out of memory"),
    ("fenced", r"did not run for|lease was lost|^etcd has not answered|to renew the lease$|it was stopped$"),
    ("worker_failed", r"^rank \d+ |^node \S+ cannot start|^cannot start a worker"),
    ("node_lost", r"^nodes? .*\blost\b"),
    ("node_joined", r"^nodes? .*\bjoins?\b"),
    ("node_left", r"^nodes? .*\b(left|leaves?)\b|^the node left"),
)


def reason_of(cause: str) -> str:
    """A round's cause as one of REASONS, which are few and stay the same."""
    return next((reason for reason, sign in _SIGNS if re.search(sign, cause)), "other")


class JobRecord:
    """Fed in each pass of the agent's loop; counts for the whole job while this agent leads it."""

    def __init__(self, began: float) -> None:
        """`began`: when this agent began, on the clock of `note`."""
        self._restarts = dict.fromkeys(REASONS, 0)
        self._lost_steps = 0
        self._recovery = dict.fromkeys(RECOVERY_PHASES, Histogram())
        self._rendezvous = Histogram()
        self._newest: dict[str, Example] = {}
        self._began: float | None = began  # None: the first round of this node has been counted
        self._round = 0
        self._recovered: frozenset[tuple[float, int]] = frozenset()

    def note(self, status: JobStatus, *, cause: str, is_leader: bool, now: float) -> None:
        """`cause`: of the round that `status` shows."""
        if status.round > self._round:
            if self._round and is_leader:
                self._restarts[reason_of(cause)] += 1
            self._round = status.round
        if self._began is not None and status.workers:
            self._rendezvous = self._rendezvous.observed(max(0.0, now - self._began))
            self._began = None
        done = {(i.time, i.round): i for i in status.incidents if i.seconds.total is not None}
        for key in done.keys() - self._recovered:
            incident = done[key]
            if incident.seconds.rendezvous is not None:
                self._rendezvous = self._rendezvous.observed(incident.seconds.rendezvous)
            if is_leader:
                self._lost_steps += incident.lost_steps or 0
                for phase in RECOVERY_PHASES:
                    seconds: float | None = getattr(incident.seconds, phase)
                    if seconds is not None:
                        self._recovery[phase] = self._recovery[phase].observed(seconds)
                        labels = {"round": str(incident.round), "reason": reason_of(incident.cause)}
                        self._newest[phase] = Example(labels=labels, seconds=seconds, unix_time=incident.time)
        self._recovered = frozenset(done)

    def totals(self) -> JobTotals:
        return JobTotals(
            restarts=dict(self._restarts),
            lost_steps=self._lost_steps,
            recovery=dict(self._recovery),
            rendezvous=self._rendezvous,
            newest=dict(self._newest),
        )
