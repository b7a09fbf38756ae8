"""What the agent measures: noted by its loop, asked for by HTTP threads, which never touch what the loop works with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elastic.agent.crew import Crew
from elastic.agent.mailbox import Mailbox, Request
from elastic.config import JobConfig
from elastic.metrics.goodput import Seen
from elastic.metrics.goodput_file import KeptGoodput, place
from elastic.metrics.history import History, point_of
from elastic.metrics.job_record import JobRecord
from elastic.metrics.measured import Measured, StoreTotals, WorkerReport
from elastic.metrics.site import Target, target
from elastic.metrics.totals import Totals, commit_times
from elastic.progress import Progress
from elastic.rendezvous.membership import View
from elastic.rendezvous.round import Node
from elastic.status import JobStatus, plural
from elastic.timings import Histogram

logger = logging.getLogger(__name__)
_ANSWER_SECONDS = 2.0
_SHOWN_WAITING = 8


class StoreMeter:
    """Told by the threads that talk to the store."""

    def __init__(self) -> None:
        self._renewals = Histogram()
        self.errors: Callable[[], int] = lambda: 0

    def renewed(self, seconds: float) -> None:
        """Called by the lease's one thread after each answered renewal."""
        self._renewals = self._renewals.observed(seconds)

    def totals(self) -> StoreTotals:
        return StoreTotals(lease_renewals=self._renewals, errors=self.errors())


class Measuring:
    """`passed` and `ended` are the loop's, `measure` and `points` are for any thread."""

    def __init__(self, *, config: JobConfig, crew: Crew, mailbox: Mailbox, store: Callable[[], StoreTotals]) -> None:
        self._crew, self._mailbox, self._store = crew, mailbox, store
        self._totals = Totals(config.nproc_per_node)
        self._record = JobRecord(time.monotonic())
        self._goodput = KeptGoodput(place(config.checkpoint_dir, config.run_id, config.node_id))
        self._history = History()
        self._commits = {"disk": 0.0, "memory": 0.0}  # unix time of the newest by tier
        self._status: JobStatus | None = None
        self._said = ""  # the state that the log knows of
        self._is_leader = False
        self._nodes: tuple[Node, ...] = ()
        self._last: Measured | None = None

    def passed(self, status: JobStatus, view: View) -> None:
        """At the end of each pass of the loop, with what it has come to."""
        now = time.monotonic()
        self._status, self._is_leader, self._nodes = status, view.is_leader, view.nodes
        self._say(status)
        cause = view.round.cause if view.round is not None else ""
        self._record.note(status, cause=cause, is_leader=view.is_leader, now=now)
        reported = [worker.progress for worker in self._crew.workers.alive if worker.progress.pid]
        self._goodput.account.note(Seen(time=now, status=status, worker=min(reported, key=_step, default=None)))
        self._commits = commit_times([worker.progress for worker in self._crew.workers.all], self._commits)
        unix_time = time.time()
        if self._history.is_due(unix_time, status):
            self._history.note(point_of(unix_time, status, reported, self._goodput.account.whole.ratio))

    def _say(self, status: JobStatus) -> None:
        """A line for each change of state that has none of its own."""
        before, self._said = self._said, status.state
        if status.state != before and status.state in ("running", "waiting", "spare"):
            why = "; ".join(f"{node.node_id}: {node.reason}" for node in status.waiting[:_SHOWN_WAITING])
            ranks = plural(status.world_size, "rank")
            logger.info("round %d: %s, %s%s", status.round, status.state, ranks, why and f" ({why})")

    def ended(self) -> None:
        """All workers have ended and are about to be forgotten: what they have counted is taken over."""
        self._totals.take(self._reports())

    def measure(self) -> Measured:
        """Everything as of now, made by the loop; what it made last when it is busy for too long.

        Raises: TimeoutError when there is nothing yet.
        """
        request = Request(self._make)
        self._mailbox.post(request)
        try:
            answer: Measured | None = request.result(_ANSWER_SECONDS)
        except TimeoutError:
            answer = self._last
        if answer is None:
            raise TimeoutError("the agent's loop has not finished its first pass")
        return answer

    def points(self, since: float) -> str:
        """What the page draws, as JSON: everything noted after a unix time."""
        return self._history.to_json(since, time.time(), self._commits)

    def targets(self) -> list[Target]:
        """Every agent of the job that is known here and can be reached, spares included, for Prometheus to scrape."""
        run_id = self._status.run_id if self._status is not None else ""
        return [target(node.http, run_id=run_id, node_id=node.node_id) for node in self._nodes if node.http]

    def close(self) -> None:
        self._goodput.close()

    def _make(self) -> Measured | None:
        if self._status is None:
            return None
        reports = self._reports()
        self._totals.take(reports)
        account = self._goodput.account
        self._last = Measured(
            status=self._status,
            is_leader=self._is_leader,
            workers=reports,
            totals=self._totals.all(),
            job=self._record.totals(),
            store=self._store(),
            goodput=account.whole.ratio,
            seconds=account.ours.seconds,
            commit_times=dict(self._totals.commit_times),
            block_errors=self._totals.damaged,
        )
        return self._last

    def _reports(self) -> tuple[WorkerReport, ...]:
        return tuple(
            WorkerReport(
                local_rank=worker.plan.local_rank,
                pid=worker.pid,
                is_alive=worker.is_alive,
                progress=worker.progress,
                timings=worker.timings,
                is_damaged=worker.is_damaged,
            )
            for worker in self._crew.workers.all
        )


def _step(report: Progress) -> int:
    return report.step
