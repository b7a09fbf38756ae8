"""What one scrape is made from, as frozen data: the agent's loop makes it, the collector puts it into metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic.progress import Progress
from elastic.status import JobStatus
from elastic.timings import NO_TIMINGS, Histogram, Timings

RECOVERY_PHASES = ("detect", "stop", "rendezvous", "start", "restore", "first_step", "total")
REASONS = (
    "worker_failed",
    "out_of_memory",
    "hung",
    "node_lost",
    "node_left",
    "node_joined",
    "fenced",
    "other",
)
TIME_KINDS = (
    "steps",
    "start",
    "rendezvous",
    "restore",
    "repeated",
    "checkpoint",
    "drain",
    "waiting",
    "down",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One local worker of the round, as its block shows it."""

    local_rank: int
    pid: int
    is_alive: bool
    progress: Progress = dataclasses.field(default_factory=Progress)  # pid 0: it has not reported
    timings: Timings = dataclasses.field(default_factory=lambda: NO_TIMINGS)
    is_damaged: bool = False  # its block; the rest is then what could be read last

    @property
    def has_series(self) -> bool:
        """Whether there is something to show of it now: alive, and it says so itself."""
        return self.is_alive and not self.is_damaged and self.progress.pid != 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTotals:
    """What the workers of one local rank have counted since the agent began, by the names of the block."""

    counters: Mapping[str, float]
    timings: Timings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One observation of a histogram, and what it was of: OpenMetrics' exemplar."""

    labels: Mapping[str, str]
    seconds: float
    unix_time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """What has happened to the whole job while this agent led it; `rendezvous` is this node's own."""

    restarts: Mapping[str, int]  # by REASONS
    lost_steps: int
    recovery: Mapping[str, Histogram]  # by RECOVERY_PHASES
    rendezvous: Histogram
    newest: Mapping[str, Example] = dataclasses.field(default_factory=dict)  # of `recovery`, by its phases


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreTotals:
    """How it goes with the control plane; all zero on one node without a server."""

    lease_renewals: Histogram = dataclasses.field(default_factory=Histogram)
    errors: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything of one moment."""

    status: JobStatus
    is_leader: bool
    workers: tuple[WorkerReport, ...]
    totals: Mapping[int, WorkerTotals]  # by local rank, all of them at any time
    job: JobTotals
    store: StoreTotals
    goodput: float  # since the job began, agents before this one included
    seconds: Mapping[str, float]  # by TIME_KINDS, since this agent began
    commit_times: Mapping[str, float]  # unix time of the newest commit by tier; 0 = none yet
    block_errors: int  # blocks that were found damaged so far
