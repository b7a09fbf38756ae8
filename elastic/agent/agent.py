"""The agent: one loop that observes, decides, acts, and then tells systemd and the warden that it has done so.

It follows torch's ElasticAgent contract (WorkerSpec, RunResult, LogsSpecs, error files) with a loop of its own: woken
by ended processes, signals and the membership, never polling, never blocked in a rendezvous or a store call. The agent
hosts a fresh TCPStore for each round and is never a client of it.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic.agent import failure as failures
from elastic.agent import guard as guards
from elastic.agent.crew import Crew
from elastic.agent.decide import Act, Action, Asked, Observation, decide
from elastic.agent.incidents import Incidents
from elastic.agent.mailbox import Mailbox, Readable, Request, SignalReceived
from elastic.agent.systemd import Notifier
from elastic.agent.view import Facts, job_status
from elastic.agent.workers import adopt_orphans, reap_orphans
from elastic.config import JobConfig
from elastic.errors import ExitCode
from elastic.rendezvous.membership import Breakage, Membership
from elastic.rendezvous.round import Phase, Round
from elastic.status import FailureStatus, JobOutcome, JobStatus

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)

_STATUS_SECONDS = 2.0
_PASSES_PER_TTL = 6
_ACTS_PER_PASS = 8
_STACKS_SECONDS = 0.2
_OUTCOMES: dict[ExitCode, JobOutcome] = {
    ExitCode.SUCCEEDED: "succeeded",
    ExitCode.DRAINED: "drained",
    ExitCode.STEPS_LOST: "drained",
}


class Agent(ElasticAgent):
    """One node's agent. Built by `launch.run_job`, which owns what is handed in."""

    def __init__(
        self,
        *,
        config: JobConfig,
        spec: WorkerSpec,
        crew: Crew,
        membership: Membership,
        mailbox: Mailbox,
        guard: guards.Guard,
        notifier: Notifier,
        incarnation: str,
    ) -> None:
        self._config = config
        self._group = WorkerGroup(spec)
        self._crew = crew
        self._membership = membership
        self._mailbox = mailbox
        self._notifier = notifier
        self._incarnation = incarnation
        self._guard = guard
        self._incidents = Incidents()
        self._asked = Asked.NOTHING
        self._joining = False
        self._done = False
        self._last_failure: FailureStatus | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._finished: ExitCode | None = None
        self._last_pass = time.monotonic()
        self._last_status: JobStatus | None = None

    # What others ask of it, from their own threads.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._group

    def status(self) -> JobStatus:
        """The status as of now, made by the loop; the last one when the loop is busy for too long."""
        request = Request(self._make_status)
        self._mailbox.post(request)
        try:
            answer: JobStatus = request.result(_STATUS_SECONDS)
        except TimeoutError:
            if self._last_status is None:
                raise
            return self._last_status
        return answer

    def is_healthy(self) -> bool:
        """Whether the loop has passed within two lease ttls."""
        return time.monotonic() - self._last_pass < 2 * self._config.lease_ttl_seconds

    # The loop.

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job on this node until it ends; `exit_code` then says how."""
        adopt_orphans()
        self._membership.open(self._mailbox.wake)
        self._guard.start()
        try:
            self._pass([])
            while self._finished is None:
                self._pass(self._mailbox.wait(self._next_deadline()))
        finally:
            self._release()
        succeeded = self._finished is ExitCode.SUCCEEDED
        self._group.state = WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED
        return RunResult(state=self._group.state, failures=self._failures)

    @property
    def exit_code(self) -> ExitCode:
        """How the job ended here; valid after `run`."""
        return ExitCode.FAILED if self._finished is None else self._finished

    @property
    def has_session(self) -> bool:
        """Whether any worker has ever said what step it was at."""
        return self._crew.applied_step >= 0

    @property
    def last_failure(self) -> FailureStatus | None:
        return self._last_failure

    def _pass(self, events: list[Any]) -> None:
        """Observe, decide, act, tell."""
        now = time.monotonic()
        self._notice_freeze(now)
        self._take(events)
        self._crew.read_progress()
        self._membership.pump(now)
        for _ in range(_ACTS_PER_PASS):  # one act may make the next one due; a pass must end all the same
            actions = decide(self._observe(now))
            for action in actions:
                self._act(action, now)
            if not actions or self._finished is not None:
                break
        else:
            self._mailbox.wake()
        self._close_incident()
        for event in events:
            if isinstance(event, Request):
                event.serve()
        self._tell()

    def _next_deadline(self) -> float:
        now, done = time.monotonic(), self._crew.done
        due = [self._membership.pump(now)]
        if not done.killed:
            due += [done.settling_until, done.drain_until, done.terminate_until]
        heartbeat = now + self._config.lease_ttl_seconds / _PASSES_PER_TTL
        return min([heartbeat, *(deadline for deadline in due if deadline is not None)])

    def _notice_freeze(self, now: float) -> None:
        """The loop did not run for longer than its workers were allowed to live: the warden has killed them."""
        alive = self._crew.workers.alive
        if alive and now > self._membership.fence(self._last_pass):
            logger.warning("the agent did not run for %.1f s: its workers are stopped", now - self._last_pass)
            self._crew.done.frozen = True
            self._begin_incident("agent frozen", failed_at=self._last_pass)
            self._crew.kill()

    def _take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, SignalReceived):
                self._take_signal(event.number)
            elif isinstance(event, Readable) and event.key == guards.KEY:
                self._guard.replace()
        ended = self._crew.workers.collect(events)
        for worker in ended:
            logger.info("round %d: rank %d ended with %s", self._crew.round, worker.plan.rank, worker.exit_code)
        if ended:
            self._guard.cover([worker.pid for worker in self._crew.workers.alive])
        failed = [worker for worker in ended if worker in self._crew.failed]
        if failed:
            self._begin_incident("worker failed", failed_at=min(worker.exited_at for worker in failed))

    def _take_signal(self, number: signal.Signals) -> None:
        logger.info("received %s", number.name)
        if number in (signal.SIGTERM, signal.SIGINT):
            self._asked = Asked.STOP if self._asked is not Asked.NOTHING else Asked.DRAIN
        elif number == signal.SIGQUIT:
            self._crew.workers.dump_stacks()
            time.sleep(_STACKS_SECONDS)  # the workers write their stacks themselves
            self._asked = Asked.STOP
        elif number == signal.SIGHUP:
            self._crew.workers.reopen_logs()
        elif number == signal.SIGUSR1 and self._config.usr1 == "drain":
            self._asked = max(self._asked, Asked.DRAIN)
        elif number == signal.SIGUSR1:
            for worker in self._crew.workers.alive:
                worker.request_save()

    def _observe(self, now: float) -> Observation:
        formed = self._membership.view().round
        is_member = formed is not None and formed.node_rank(self._config.node_id) is not None
        crew, done = self._crew, self._crew.done
        return Observation(
            now=now,
            round_number=formed.number if formed and is_member else 0,
            round_phase=formed.phase if formed else Phase.RUNNING,
            round_outcome=formed.outcome if formed else "",
            started_round=crew.round,
            workers=crew.views(),
            asked=self._asked,
            announced=done.announced,
            settling_until=done.settling_until,
            drain_until=done.drain_until,
            terminate_until=done.terminate_until,
            killed=done.killed,
            done=self._done,
            frozen=done.frozen,
            joining=self._joining,
            steps_lost=crew.applied_step > crew.disk_step,
        )

    # Acts.

    def _act(self, action: Action, now: float) -> None:
        if action.act is Act.LEAVE:
            self._membership.leave(outcome=_OUTCOMES.get(action.exit_code, "failed"))
        elif action.act is Act.FINISH:
            self._finished = action.exit_code
        elif action.act in (Act.START, Act.ANNOUNCE, Act.SETTLE, Act.DRAIN, Act.TERMINATE):
            {
                Act.START: self._start,
                Act.ANNOUNCE: self._announce,
                Act.SETTLE: self._crew.settle,
                Act.DRAIN: self._drain,
                Act.TERMINATE: self._crew.terminate,
            }[action.act](now)
        else:
            {Act.JOIN: self._join, Act.KILL: self._crew.kill, Act.DONE: self._tell_done, Act.CLEAR: self._clear}[
                action.act
            ]()

    def _join(self) -> None:
        self._joining = True
        self._membership.join(after=self._crew.round, store_port=self._crew.open_store())

    def _start(self, _now: float) -> None:
        formed = self._membership.view().round
        if formed is None:
            return
        self._joining = False
        self._incidents.decided(formed.number, time.monotonic())
        logger.info(
            "round %d: %s; starting ranks %s of %d",
            formed.number,
            formed.cause,
            list(formed.ranks(self._config.node_id)),
            formed.world_size,
        )
        try:
            self._crew.start(formed)
        except OSError as exc:
            logger.error("round %d: cannot start a worker: %s", formed.number, exc)
            self._last_failure = FailureStatus(
                rank=None, node_id=self._config.node_id, reason="cannot start", message=str(exc)
            )
            self._tell_broken(f"cannot start a worker: {exc}")
            self._crew.kill()
        self._guard.cover([worker.pid for worker in self._crew.workers.alive])
        self._fill_group(formed)

    def _fill_group(self, formed: Round) -> None:
        """torch's view of the workers, for who reads it through `get_worker_group`."""
        group: Any = self._group  # torch leaves the attributes that a rendezvous fills in without types
        group.group_rank = formed.node_rank(self._config.node_id)
        group.group_world_size = len(formed.members)
        group.master_addr, group.master_port = self._crew.master
        group.state = WorkerState.HEALTHY
        for slot, worker in zip(self._group.workers, self._crew.workers.all, strict=False):
            slot.id = worker.pid
            slot.global_rank = slot.role_rank = worker.plan.rank
            slot.world_size = slot.role_world_size = formed.world_size

    def _announce(self, _now: float) -> None:
        """Tell the cause; what a frozen agent's workers died of is not held against the job."""
        failure = self._crew.first_failure()
        if self._crew.done.frozen or failure is None:
            self._tell_broken("agent frozen", charged=False)
            return
        self._last_failure = failure
        self._failures = failures.for_torch(self._crew.failed)
        summary = f"rank {failure.rank} {failure.reason}: {failure.message.splitlines()[0]}"
        logger.error("round %d: %s%s", self._crew.round, summary, _details(failure))
        self._incidents.name(summary)
        self._tell_broken(summary, fatal=any(view.is_final for view in self._crew.views()))

    def _tell_broken(self, cause: str, *, charged: bool = True, fatal: bool = False) -> None:
        self._crew.done.announced = True
        self._membership.announce(
            Breakage(cause=cause, charged=charged, progressed=self._crew.has_progressed, fatal=fatal)
        )

    def _drain(self, now: float) -> None:
        logger.info("round %d: draining, up to %s s", self._crew.round, self._config.drain_grace_seconds)
        self._crew.drain(now)

    def _tell_done(self) -> None:
        self._done = True
        self._membership.done()

    def _clear(self) -> None:
        self._incidents.stopped(time.monotonic())
        self._crew.clear(self._guard.pids)
        reap_orphans(self._guard.pids)

    # After the acts.

    def _begin_incident(self, cause: str, *, failed_at: float) -> None:
        self._crew.read_progress()
        self._incidents.begin(
            cause=cause, applied_step=self._crew.applied_step, failed_at=failed_at, now=time.monotonic()
        )

    def _close_incident(self) -> None:
        incident = self._incidents.observe([worker.progress for worker in self._crew.workers.all])
        if incident is not None:
            logger.info(
                "round %d: recovered in %.2f s (%s), %s steps repeated",
                incident.round,
                incident.seconds.total or 0.0,
                incident.cause,
                incident.lost_steps,
            )

    def _tell(self) -> None:
        """The pass is finished: move the workers' deadline on, feed systemd's watchdog."""
        self._last_pass = now = time.monotonic()
        self._guard.allow_for(self._membership.fence(now) - now)
        self._notifier.alive()
        self._last_status = status = self._make_status()
        if status.state in ("running", "waiting", "spare"):
            self._notifier.state(READY="1")
        self._notifier.state(STATUS=_headline(status))

    def _make_status(self) -> JobStatus:
        finished = None if self._finished is None else _OUTCOMES.get(self._finished, "failed")
        crew = self._crew
        return job_status(
            Facts(
                config=self._config,
                incarnation=self._incarnation,
                view=self._membership.view(),
                workers=crew.workers.all,
                draining=crew.done.drain_until is not None,
                joining=self._joining,
                finished=finished,
                disk_step=crew.disk_step,
                memory_step=crew.memory_step,
                last_failure=self._last_failure,
                incidents=self._incidents.all([worker.progress for worker in crew.workers.all]),
            )
        )

    def _release(self) -> None:
        """Stop what still runs, whatever ended the loop."""
        self._notifier.state(STOPPING="1")
        self._crew.close()
        self._membership.close()
        self._guard.close()


def _details(failure: FailureStatus) -> str:
    """Traceback and last log lines, indented below the line that names the failure."""
    traceback = "\n".join(failure.message.splitlines()[1:])
    parts = [part for part in (traceback, failure.log) if part]
    text = "\n".join(parts)
    return "".join(f"\n    {line}" for line in text.splitlines())


def _headline(status: JobStatus) -> str:
    """One line for `systemctl status`."""
    steps = [worker.step for worker in status.workers if worker.step is not None]
    step = f", step {max(steps)}" if steps else ""
    return f"{status.state}: round {status.round}, {status.world_size} ranks{step}"
