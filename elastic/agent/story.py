"""What has gone wrong so far and how it was recovered from: failures and incidents, told to the log and to `status`."""

from __future__ import annotations

import dataclasses
import logging
import time

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic.agent import failure as failures
from elastic.agent import repeats
from elastic.agent.crew import Crew
from elastic.agent.hang import Verdict
from elastic.agent.incidents import Incidents
from elastic.agent.view import STORE_AWAY
from elastic.errors import ExitCode
from elastic.rendezvous.membership import Breakage, View
from elastic.rendezvous.round import Phase, Round
from elastic.status import FailureStatus, Incident, plural

logger = logging.getLogger(__name__)


class Story:
    """Fed by the agent's loop."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._incidents = Incidents()
        self._fenced_by = ""
        self._told_round = 0  # the last one whose beginning was told
        self._places: dict[repeats.Place, int] = {}
        self.last_failure: FailureStatus | None = None
        self.failures: dict[int, ProcessFailure] = {}  # of the last round that failed, by rank: torch's contract

    def begin(self, cause: str, *, failed_at: float, is_known: bool = False) -> bool:
        """Something has ended the round, or is about to. `is_known`, and what is returned: see `Incidents.begin`."""
        self._crew.read_progress()
        return self._incidents.begin(
            cause=cause,
            applied_step=self._crew.applied_step,
            failed_at=failed_at,
            now=time.monotonic(),
            reports=[worker.progress for worker in self._crew.workers.all],
            is_known=is_known,
        )

    def fenced(self, cause: str, *, failed_at: float) -> None:
        """The workers were not allowed to live any longer."""
        logger.warning("round %d: %s: its workers are stopped", self._crew.round, cause)
        self._fenced_by = cause
        self.begin(cause, failed_at=failed_at, is_known=True)

    def hung(self, verdict: Verdict) -> None:
        """The workers do not get on: they write their stacks and are stopped."""
        who = "this node" if verdict.rank is None else f"rank {verdict.rank}"
        logger.warning("round %d: %s: %s; stacks go to the logs", self._crew.round, who, verdict.message)
        self.begin(f"hung: {verdict.message}", failed_at=verdict.since)

    def note_round(self, view: View) -> None:
        """What ended the round elsewhere begins the incident here; so does a store that is away for too long."""
        formed = view.round
        if formed is None or not self._crew.workers.alive or self._crew.done.killed:
            return
        if view.is_expelled:
            self.begin("the lease was lost", failed_at=time.monotonic())
        elif formed.phase in (Phase.DRAINING, Phase.BROKEN) and formed.number == self._crew.round:
            if self.begin(formed.cause, failed_at=time.monotonic() - formed.failed_before):
                level = logging.WARNING if formed.phase is Phase.BROKEN else logging.INFO
                logger.log(level, "round %d is over: %s", formed.number, formed.cause)
        elif view.drain_wanted:
            self.begin(STORE_AWAY, failed_at=time.monotonic(), is_known=True)

    def stopped(self) -> None:
        self._incidents.stopped(time.monotonic())

    def decided(self, formed: Round) -> None:
        self._incidents.decided(formed.number, time.monotonic(), formed.cause)

    def cannot_start(self, node_id: str, error: OSError) -> Breakage:
        """A worker could not even be started."""
        logger.error("round %d: cannot start a worker: %s", self._crew.round, error)
        self.last_failure = FailureStatus(rank=None, node_id=node_id, reason="cannot start", message=str(error))
        return Breakage(cause=f"cannot start a worker: {error}", charged=True, progressed=False)

    def breakage(self, node_id: str) -> Breakage:
        """Why this node's workers have ended; what a fenced node's workers died of is not held against the job."""
        hung, progressed = self._crew.done.hung, self._crew.has_progressed
        failure = self._crew.first_failure()
        if self._crew.done.frozen or failure is None:
            cause = f"node {node_id}: {self._fenced_by or 'it was stopped'}"
            return Breakage(cause=cause, charged=False, progressed=progressed)
        failed = [view for view in self._crew.views() if view.has_failed]
        consequence = hung.consequence if hung else all(view.consequence for view in failed)
        failure, is_repeated = (failure, False) if hung or consequence else self._count(failure)
        if not consequence:
            self.last_failure = failure
        self.failures = failures.for_torch(self._crew.failed)
        where = f" on {node_id}" if self._crew.has_peers else ""
        who = f"node {node_id}" if failure.rank is None else f"rank {failure.rank}{where}"
        summary = f"{who} {failure.headline}"
        # What only followed from the loss of a peer is not what to look at, and its log has it in full.
        level, details = (logging.WARNING, "") if consequence else (logging.ERROR, _details(failure))
        logger.log(level, "round %d: %s%s", self._crew.round, summary, details)
        self._incidents.name(summary)
        do_not_retry = any(view.exit_code == ExitCode.DO_NOT_RETRY for view in failed)
        return Breakage(
            cause=summary,
            charged=True,
            progressed=progressed,
            fatal=is_repeated or any(view.is_final for view in failed),
            consequence=consequence,
            seconds=self._incidents.age(time.monotonic()),
            exit_code=int(ExitCode.DO_NOT_RETRY if do_not_retry else ExitCode.FAILED),
        )

    def _count(self, failure: FailureStatus) -> tuple[FailureStatus, bool]:
        """The failure, and whether it has come back in the same place too often to be tried again: then it says so."""
        steps = {w.plan.rank: w.progress.step for w in self._crew.workers.all if w.progress.in_loop}
        rank = failure.rank
        place = None
        if rank is not None and rank in steps:
            place = repeats.place_of(failure.message, rank=rank, applied_step=steps[rank])
        self._places = repeats.note(self._places, place, applied_step=min(steps.values(), default=-1))
        if place is None or self._places[place] < repeats.LIMIT:
            return failure, False
        first, *rest = failure.message.splitlines()
        lines = (
            f"deterministic failure at step {place.step}: {first}",
            f"the same {self._places[place]} times, at {place.frame}: it is not tried again",
            *rest,
        )
        return dataclasses.replace(failure, message="\n".join(lines)), True

    def look_for_progress(self) -> None:
        """Tell where training begins; close the incident once every local worker has applied a new step."""
        reports = [worker.progress for worker in self._crew.workers.all]
        if self._told_round != self._crew.round and reports and all(report.in_loop for report in reports):
            self._told_round, step = self._crew.round, reports[0].base_step
            logger.info(
                "round %d: training %s", self._crew.round, f"goes on after step {step}" if step > 0 else "begins"
            )
        incident = self._incidents.observe(reports)
        if incident is not None:
            logger.info(
                "round %d: recovered in %.2f s (%s)%s",
                incident.round,
                incident.seconds.total or 0.0,
                incident.cause,
                "" if incident.lost_steps is None else f", {plural(incident.lost_steps, 'step')} repeated",
            )

    def incidents(self) -> tuple[Incident, ...]:
        return self._incidents.all([worker.progress for worker in self._crew.workers.all])


def _details(failure: FailureStatus) -> str:
    """Traceback and last log lines, indented below the line that names the failure."""
    traceback = "\n".join(failure.message.splitlines()[1:])
    text = "\n".join(part for part in (traceback, failure.log) if part)
    return "".join(f"\n    {line}" for line in text.splitlines())
