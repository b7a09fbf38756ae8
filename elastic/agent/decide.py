"""What to do next: one pure function from an observation to actions. The agent carries them out in order.

Every cause enters the same line: a worker that fails, a peer's failure, a drain, a stop, the end of the training.

    observe -> is somebody to be stopped? -> has everybody stopped? -> what does that mean? -> next round or the end
"""

from __future__ import annotations

import dataclasses
import enum

from elastic.errors import ExitCode
from elastic.progress import Outcome
from elastic.rendezvous.round import Phase


class Asked(enum.IntEnum):
    """What the operator has asked for; only grows."""

    NOTHING = 0
    DRAIN = 1  # leave at a step boundary, saved
    STOP = 2  # leave now


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One local worker as the decision sees it."""

    local_rank: int
    exit_code: int | None = None  # None while it runs
    outcome: Outcome = Outcome.NONE
    in_loop: bool = False
    consequence: bool = False  # its failure looks like the loss of a peer (a communication error)
    stopped_by_us: bool = False

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def has_failed(self) -> bool:
        return not self.is_alive and not self.stopped_by_us and (self.exit_code != 0 or self.outcome is Outcome.FATAL)

    @property
    def is_final(self) -> bool:
        """A failure that would come back: the worker says so itself, by its block or by EX_CONFIG."""
        return self.has_failed and (self.outcome is Outcome.FATAL or self.exit_code == ExitCode.DO_NOT_RETRY)

    @property
    def has_finished(self) -> bool:
        """Trained to its end: it says so, or it exited with 0 and nobody had asked it to."""
        if self.exit_code != 0:
            return False
        return self.outcome is Outcome.FINISHED or (self.outcome is Outcome.NONE and not self.stopped_by_us)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that the decision depends on. Times are CLOCK_MONOTONIC seconds; None = not begun."""

    now: float
    round_number: int = 0  # newest round this node is a member of; 0 = none
    round_phase: Phase = Phase.RUNNING
    closed: ExitCode | None = None  # the job has ended, for spares as well, and this is how
    error: ExitCode | None = None  # this node cannot go on: no nodes, no store
    expelled: bool = False  # the lease is lost, or the others went on without this node
    may_join_again: bool = True  # the last join has had time to show, or what it failed for has had time to pass
    fenced: bool = False  # the lease may have ended already: a seat seen now may be another's
    drain_wanted: bool = False  # the store does not answer: save while the lease lasts
    started_round: int = 0  # the round whose workers are below
    workers: tuple[WorkerView, ...] = ()
    asked: Asked = Asked.NOTHING
    announced: bool = False  # the failure of this round was told
    settling_until: float | None = None  # a communication error was first: the real cause may still show
    drain_until: float | None = None  # workers were asked to drain
    terminate_until: float | None = None  # workers were sent SIGTERM
    hung: bool = False  # a rank is behind, and the others wait for it
    stacks_until: float | None = None  # workers were asked for their stacks
    killed: bool = False
    done: bool = False  # told that this round's workers have finished
    frozen: bool = False  # the warden has killed the workers, because the agent did not run
    joining: bool = False
    steps_lost: bool = False  # steps were applied after the newest committed one


class Act(enum.Enum):
    """What the agent can do."""

    JOIN = "join the next round"
    START = "start the round's workers"
    SETTLE = "wait a moment for the real cause"
    ANNOUNCE = "tell that the round is broken"
    DUMP = "let the workers write their stacks"
    DRAIN = "ask the workers to drain"
    TERMINATE = "send the workers SIGTERM"
    KILL = "kill the workers"
    DONE = "tell that the workers have finished"
    CLEAR = "clear away what the round left"
    LEAVE = "leave the job"
    FINISH = "end the agent"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One act, with the exit code where the agent is to end."""

    act: Act
    exit_code: ExitCode = ExitCode.SUCCEEDED


def decide(seen: Observation) -> tuple[Action, ...]:
    """Actions for this pass; empty when there is nothing to do but wait."""
    alive = [worker for worker in seen.workers if worker.is_alive]
    if alive:
        return _while_alive(seen, alive)
    if seen.started_round and seen.workers:
        return _all_gone(seen)
    return _without_workers(seen)


def _while_alive(seen: Observation, alive: list[WorkerView]) -> tuple[Action, ...]:
    if seen.killed:
        return ()
    if seen.asked is Asked.STOP and seen.started_round and not seen.announced:
        return (Action(act=Act.ANNOUNCE), Action(act=Act.KILL))  # peers must not wait for ranks that are gone
    if seen.asked is Asked.STOP or seen.error is not None or _is_over(seen):
        return (Action(act=Act.KILL),)
    if seen.hung:
        return _after_hang(seen)
    failed = [worker for worker in seen.workers if worker.has_failed]
    if failed:
        return _after_failure(seen, failed, alive)
    if seen.asked is Asked.DRAIN or seen.drain_wanted or seen.round_phase is Phase.DRAINING:
        return _drain(seen, alive)
    return ()


def _is_over(seen: Observation) -> bool:
    """The round of these workers has ended elsewhere: peers must not wait for collectives that cannot end."""
    if seen.frozen or seen.expelled or seen.round_number > seen.started_round:
        return True
    return seen.round_phase in (Phase.BROKEN, Phase.CLOSED)


def _after_failure(seen: Observation, failed: list[WorkerView], alive: list[WorkerView]) -> tuple[Action, ...]:
    """Peers are stopped at once, unless all that failed so far only lost a peer: then the cause gets a moment to show.

    Workers in a training loop of ours are killed: they would only wait in a broken collective. Others get SIGTERM.
    """
    if all(worker.consequence for worker in failed):
        if seen.settling_until is None:
            return (Action(act=Act.SETTLE),)
        if seen.now < seen.settling_until:
            return ()
    told = () if seen.announced else (Action(act=Act.ANNOUNCE),)
    if all(worker.in_loop for worker in alive):
        return (*told, Action(act=Act.KILL))
    return (*told, *_terminate(seen))


def _after_hang(seen: Observation) -> tuple[Action, ...]:
    """The stacks first: who is hung, and where the others wait for it, is gone with the processes."""
    if seen.stacks_until is None:
        return (Action(act=Act.DUMP),)
    return () if seen.now < seen.stacks_until else (Action(act=Act.ANNOUNCE), Action(act=Act.KILL))


def _drain(seen: Observation, alive: list[WorkerView]) -> tuple[Action, ...]:
    """A request where all ranks will see it; before that, and for scripts without our session, SIGTERM."""
    if seen.drain_until is not None:
        return (Action(act=Act.KILL),) if seen.now >= seen.drain_until else ()
    if seen.terminate_until is None and all(worker.in_loop for worker in seen.workers):
        return (Action(act=Act.DRAIN),)
    return _terminate(seen)


def _terminate(seen: Observation) -> tuple[Action, ...]:
    if seen.terminate_until is None:
        return (Action(act=Act.TERMINATE),)
    return (Action(act=Act.KILL),) if seen.now >= seen.terminate_until else ()


def _all_gone(seen: Observation) -> tuple[Action, ...]:
    """No worker of the started round is left: what it means depends on how they ended and on what was asked."""
    clear = Action(act=Act.CLEAR)
    failed = [worker for worker in seen.workers if worker.has_failed]
    told = (Action(act=Act.ANNOUNCE),) if (failed or seen.frozen) and not seen.announced else ()
    if all(worker.has_finished for worker in seen.workers):
        return () if seen.done else (clear, Action(act=Act.DONE))
    if any(worker.outcome is Outcome.FATAL for worker in seen.workers):
        return (*told, clear, *_finish(ExitCode.FAILED))
    if any(worker.exit_code == ExitCode.DO_NOT_RETRY for worker in failed):
        return (*told, clear, *_finish(ExitCode.DO_NOT_RETRY))
    if seen.asked is not Asked.NOTHING:
        return (*told, clear, *_finish(ExitCode.STEPS_LOST if seen.steps_lost else ExitCode.DRAINED))
    return (*told, clear, Action(act=Act.JOIN))


def _without_workers(seen: Observation) -> tuple[Action, ...]:
    if seen.closed is not None:
        return _finish(seen.closed)
    if seen.error is not None:
        return _finish(seen.error)
    if seen.asked is not Asked.NOTHING:
        return _finish(ExitCode.STEPS_LOST if seen.steps_lost else ExitCode.DRAINED)
    if seen.round_number > seen.started_round and seen.round_phase is Phase.RUNNING and seen.joining:
        return () if seen.fenced else (Action(act=Act.START),)
    if seen.joining:
        missed = seen.round_number > seen.started_round and seen.round_phase in (Phase.DRAINING, Phase.BROKEN)
        return (Action(act=Act.JOIN),) if (seen.expelled or missed) and seen.may_join_again else ()
    waits_for_peers = seen.done and seen.round_phase in (Phase.RUNNING, Phase.DRAINING) and not seen.expelled
    return () if waits_for_peers or not seen.may_join_again else (Action(act=Act.JOIN),)


def _finish(code: ExitCode) -> tuple[Action, ...]:
    return (Action(act=Act.LEAVE, exit_code=code), Action(act=Act.FINISH, exit_code=code))
