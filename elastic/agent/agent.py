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

from elastic.agent import guard as guards
from elastic.agent.crew import Crew
from elastic.agent.decide import Act, Action, Observation, decide
from elastic.agent.ending import Ending
from elastic.agent.hang_watch import HangWatch
from elastic.agent.joining import Joining
from elastic.agent.mailbox import Mailbox, Readable, Request, SignalReceived
from elastic.agent.measuring import Measuring
from elastic.agent.orders import Orders
from elastic.agent.rescuing import Rescue
from elastic.agent.sessions import Sessions
from elastic.agent.story import Story
from elastic.agent.systemd import Notifier
from elastic.agent.torch_view import fill_group
from elastic.agent.view import Facts, closed_with, job_status, why_draining
from elastic.agent.workers import Worker, adopt_orphans, reap_orphans
from elastic.config import JobConfig
from elastic.errors import ElasticError, ExitCode
from elastic.journal_json import name_node
from elastic.rendezvous.lease import FENCE_SHARE
from elastic.rendezvous.membership import Membership
from elastic.rendezvous.round import Phase
from elastic.status import JobOutcome, JobStatus

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)

_STATUS_SECONDS = 2.0
_PASSES_PER_TTL = 6
_PASSES_PER_WATCHDOG = 4
_ACTS_PER_PASS = 8
_REAP_SECONDS = 5.0  # a script may leave any number of orphans behind while it runs
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
        measuring: Measuring,
    ) -> None:
        self._config = config
        self._group = WorkerGroup(spec)
        self._crew = crew
        self._membership = membership
        self._mailbox = mailbox
        self._notifier = notifier
        self._measuring = measuring
        self._guard = guard
        self._story = Story(crew)
        self._hangs = HangWatch(crew, config)
        self.sessions = Sessions(config)
        self.orders = Orders(config=config, crew=crew, membership=membership, mailbox=mailbox)
        self._joining = Joining(crew=crew, membership=membership, patience_seconds=config.join_timeout_seconds)
        self._rescue = Rescue(config=config, crew=crew, mailbox=mailbox, notifier=notifier)
        self._done = False
        self._finished: ExitCode | None = None
        self._error: ElasticError | None = None  # kept: a membership that has been left has none
        self._last_pass = self._reaped_at = time.monotonic()
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
        """Run the job on this node until it ends; `ending` then says how."""
        adopt_orphans()
        self._membership.open(self._mailbox.wake)
        self._guard.start()
        try:
            self._pass([])
            while self._finished is None:
                self._pass(self._mailbox.wait(self._next_deadline()))
        finally:
            self._release()
            self._finished = self._rescue.run(self._ended_with(), self.orders, self._serve)  # also when this has failed
        succeeded = self._finished is ExitCode.SUCCEEDED
        self._group.state = WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED
        return RunResult(state=self._group.state, failures=self._story.failures)

    def ending(self) -> Ending:
        """How the job ended here; valid after `run`."""
        view, crew = self._membership.view(), self._crew
        return Ending(
            exit_code=self._ended_with(),
            error=self._error,
            cause=view.round.cause if view.round is not None and view.outcome == "failed" else "",
            had_last_round=view.round is not None and view.round.number == crew.round,
            applied_step=crew.applied_step,
            committed_step=crew.disk_step,
            failure=self._story.last_failure,
            last_words=self.sessions.last_words,
            is_in_memory=self._rescue.is_kept,
        )

    def _ended_with(self) -> ExitCode:
        return ExitCode.FAILED if self._finished is None else self._finished

    def _pass(self, events: list[Any]) -> None:
        """Observe, decide, act, tell."""
        now = time.monotonic()
        self._crew.read_progress()
        self.sessions.look(self._crew.workers.all, now)
        self._story.look_for_progress()  # before what has ended begins an incident of its own
        self._take(events)
        self._membership.pump(now)
        if (verdict := self._hangs.look(now)) is not None:
            self._story.hung(verdict)
        for _ in range(_ACTS_PER_PASS):  # one act may make the next one due; a pass must end all the same
            actions = decide(self._observe(now))
            for action in actions:
                self._act(action, now)
            if not actions or self._finished is not None:
                break
        else:
            self._mailbox.wake()
        if self._joining.prepare():
            self._cover()
        if now >= self._reaped_at + _REAP_SECONDS:
            self._reap()
        self._serve(events)
        self._tell()

    def _serve(self, events: list[Any]) -> None:
        """Answer who has asked; also when the loop is over, and something is still under way."""
        self._last_pass = time.monotonic()
        for event in events:
            if isinstance(event, Request):
                event.serve()

    def _next_deadline(self) -> float:
        now, done = time.monotonic(), self._crew.done
        due = [self._membership.pump(now)]
        if not done.killed:
            due += [done.settling_until, done.drain_until, done.terminate_until, done.stacks_until, self._hangs.due]
        due += [now + self._config.lease_ttl_seconds / _PASSES_PER_TTL]
        if self._notifier.watchdog_seconds:
            due += [now + self._notifier.watchdog_seconds / _PASSES_PER_WATCHDOG]
        return min(deadline for deadline in due if deadline is not None)

    def _take(self, events: list[Any]) -> None:
        ended = self._crew.workers.collect(events)
        self._crew.standbys.collect(events)
        self._notice_freeze(ended)  # only now: who was killed while the agent stood still may be among them
        for event in events:
            if isinstance(event, SignalReceived):
                self.orders.take(event.number)
            elif isinstance(event, Readable) and event.key == guards.KEY:
                self._guard.replace()
        for worker in ended:
            logger.info("round %d: rank %d has ended: %s", self._crew.round, worker.plan.rank, worker.how_it_ended)
        if ended:
            self._cover()
        failed = [worker for worker in ended if worker in self._crew.failed]
        if failed:
            self._story.begin("worker failed", failed_at=min(worker.exited_at for worker in failed))

    def _notice_freeze(self, ended: list[Worker]) -> None:
        """The workers were not allowed to live any longer: the warden has killed them, or is about to.

        Looked at after workers were seen to end and before a pass counts as finished, so that a stop of this process
        at any point of the loop is noticed before its victims are taken for failures. The warden is replaced: one that
        is in the middle of its sweep must not find what is started from now on.
        """
        if not self._guard.is_overdue:
            return
        silent = self._guard.silent_seconds
        self._guard.restart()
        crew = self._crew
        crew.standbys.close()  # its victims too, though some may not have died yet
        if crew.done.killed or not (crew.workers.alive or ended):
            return
        was_frozen = silent > self._config.lease_ttl_seconds / 2  # a loop that runs passes several times in that
        cause = (
            f"the agent did not run for {silent:.1f} s"
            if was_frozen
            else "etcd could not be reached to renew the lease"
        )
        self._story.fenced(cause, failed_at=self._last_pass)
        crew.done.frozen = True
        crew.kill()
        self._mailbox.wake()

    def _observe(self, now: float) -> Observation:
        view = self._membership.view()
        formed = view.round
        crew, done = self._crew, self._crew.done
        self._error = self._error or view.error
        self._story.note_round(view)
        return Observation(
            now=now,
            round_number=formed.number if formed and view.node_rank is not None else 0,
            round_phase=formed.phase if formed else Phase.RUNNING,
            closed=closed_with(view),
            error=None if view.error is None else view.error.exit_code,
            expelled=view.is_expelled,
            may_join_again=self._joining.may_begin(now),
            fenced=self._membership.fence(now) <= now,
            drain_wanted=view.drain_wanted,
            started_round=crew.round,
            workers=crew.views(),
            asked=self.orders.asked,
            announced=done.announced,
            settling_until=done.settling_until,
            drain_until=done.drain_until,
            terminate_until=done.terminate_until,
            hung=done.hung is not None,
            stacks_until=done.stacks_until,
            killed=done.killed,
            done=self._done,
            frozen=done.frozen,
            joining=self._joining.is_under_way,
            steps_lost=crew.applied_step > crew.disk_step,
        )

    # Acts.

    def _act(self, action: Action, now: float) -> None:
        if action.act is Act.LEAVE:
            self._membership.leave(outcome=_OUTCOMES.get(action.exit_code, "failed"))
        elif action.act is Act.FINISH:
            self._finished = action.exit_code
        elif action.act in (Act.START, Act.ANNOUNCE, Act.SETTLE, Act.DUMP, Act.DRAIN, Act.TERMINATE):
            {
                Act.START: self._start,
                Act.ANNOUNCE: self._announce,
                Act.SETTLE: self._crew.settle,
                Act.DUMP: self._crew.dump_stacks,
                Act.DRAIN: self._drain,
                Act.TERMINATE: self._crew.terminate,
            }[action.act](now)
        else:
            {Act.JOIN: self._join, Act.KILL: self._crew.kill, Act.DONE: self._tell_done, Act.CLEAR: self._clear}[
                action.act
            ]()

    def _join(self) -> None:
        self._done = False
        self._joining.begin()

    def _start(self, _now: float) -> None:
        view = self._membership.view()
        formed = view.round
        if formed is None:
            return
        self._joining.ended()
        self._story.decided(formed)
        logger.info(
            "round %d: %s; starting ranks %s of %d",
            formed.number,
            formed.cause,
            list(formed.ranks(view.node_id)),
            formed.world_size,
        )
        try:
            self._crew.start(formed, view.node_id)
        except OSError as exc:
            self._crew.done.announced = True
            self._membership.announce(self._story.cannot_start(view.node_id, exc))
            self._crew.kill()
        self._cover()
        fill_group(self._group, formed, view, self._crew)

    def _cover(self) -> None:
        """Tell the warden which process groups are ours now."""
        self._guard.cover([*(worker.pid for worker in self._crew.workers.alive), *self._crew.standbys.pids])

    def _announce(self, _now: float) -> None:
        self._crew.done.announced = True
        self._membership.announce(self._story.breakage(self._membership.view().node_id))

    def _drain(self, now: float) -> None:
        view, patience = self._membership.view(), self._config.drain_grace_seconds
        why = why_draining(view, asked=self.orders.is_leaving)
        if view.drain_wanted:  # the workers may not live longer than that
            patience = min(patience, max(0.0, self._membership.fence(now) - now))
        logger.info("round %d: %s; draining, up to %.3g s", self._crew.round, why, patience)
        self._crew.drain(now)

    def _tell_done(self) -> None:
        self._done = True
        self._membership.done()

    def _clear(self) -> None:
        self._story.stopped()
        self._measuring.ended()
        self._crew.clear(self._guard.pids)
        self._reap()

    def _reap(self) -> None:
        crew = self._crew
        self._reaped_at = time.monotonic()
        reap_orphans(self._guard.pids | crew.standbys.pids | {worker.pid for worker in crew.workers.all})

    # After the acts.

    def _tell(self) -> None:
        """The pass is finished: move the workers' deadline on, feed systemd's watchdog."""
        self._notice_freeze([])
        self._last_pass = now = time.monotonic()
        if not self._guard.allow_for(self._allowance(now)):
            self._mailbox.wake()  # the next pass sees to it
        self._last_status = status = self._make_status()
        name_node(status.node_id)
        self._notifier.passed(status, stopping=self.orders.is_leaving)
        self._measuring.passed(status, self._membership.view())

    def _allowance(self, now: float) -> float:
        """How long the warden is to let live what it finds: workers end with the lease.

        Where there are none any more only the agent's own pulse counts.
        """
        if self._crew.workers.alive and not self._crew.done.killed:
            return self._membership.fence(now) - now
        return FENCE_SHARE * self._config.lease_ttl_seconds

    def _make_status(self) -> JobStatus:
        finished = None if self._finished is None else _OUTCOMES.get(self._finished, "failed")
        crew, done = self._crew, self._crew.done
        of_scripts = done.terminate_until if self.orders.is_leaving else None  # they have no session to drain
        return job_status(
            Facts(
                config=self._config,
                view=self._membership.view(),
                workers=crew.workers.all,
                standbys=crew.standbys.warm_ranks,
                draining=(done.drain_until or of_scripts) is not None,
                joining=self._joining.is_under_way,
                finished=finished,
                checkpoint=crew.safe,
                last_failure=self._story.last_failure,
                incidents=self._story.incidents(),
            )
        )

    def _release(self) -> None:
        """Stop what still runs, whatever ended the loop."""
        self._notifier.ending(self._finished)
        self._crew.close()
        self._membership.close()
        self._guard.close()
