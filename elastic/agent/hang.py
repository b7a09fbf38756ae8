"""Which rank is hung, and where: a pure function of what this node's workers say of themselves.

Ranks train in step: when one stands still, the others soon wait for it in a collective. So only a rank that does not
wait can be the one that is behind, and of several it is the one that is least far on. Limits, for a timeout of T:

- T since the last sign of the rank that is behind, or of the last of several that are equally far: one of them may
  have waited for the other without telling;
- 10 T in a phase that may take long: checkpoint, evaluation, compile, restore, drain; in any phase what the worker has
  declared, if that is more. Others wait for it meanwhile, and are not hung either;
- where all of this node's ranks wait: T if there are no others, else 1.25 x 10 T, because the one they wait for may be
  in such a phase; whichever rank is hung, its own agent finds it long before.

A stopped process (SIGSTOP) is behind, whatever it did before. Nothing counts before a first step of the round is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic.progress import Outcome, Phase, Progress

_DECLARED = 10.0  # times the timeout, for a phase that may take long
_AFTER_PEERS = 1.25  # so that the agent of the rank that is hung speaks first
_MAY_TAKE_LONG = frozenset((Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE, Phase.RESTORE, Phase.DRAINING))
# The order of phases within one value of `step`, the last that was applied: what follows it comes before the next one.
_STAGES = {**dict.fromkeys(_MAY_TAKE_LONG, 0), Phase.COMM_EXPOSED: 2, Phase.OPTIMIZER: 3}
_OTHER_STAGE = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A live worker of this node."""

    report: Progress
    stopped: bool = False  # its process is stopped, by SIGSTOP or a debugger

    @property
    def phase(self) -> Phase:
        """What its block says, as far as it makes sense."""
        return Phase(self.report.phase) if self.report.phase in list(Phase) else Phase.STARTING

    @property
    def waits(self) -> bool:
        return not self.stopped and (self.phase is Phase.COMM_EXPOSED or bool(self.report.waits))

    @property
    def sign(self) -> float:
        """When its training thread last got on."""
        return self.report.progressed_at or self.report.heartbeat

    def limit(self, timeout_seconds: float) -> float:
        """How long it may go without one."""
        if self.stopped:
            return timeout_seconds
        factor = _DECLARED if self.phase in _MAY_TAKE_LONG else 1.0
        return max(factor * timeout_seconds, self.report.phase_limit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The job does not get on. `rank` is the one that is behind; None: all of this node only wait."""

    rank: int | None
    message: str
    since: float  # CLOCK_MONOTONIC, the last sign of progress
    consequence: bool = False  # they wait for a rank of another node


def look(
    workers: Sequence[Seen], *, now: float, timeout_seconds: float, awake_since: float = 0.0
) -> tuple[Verdict | None, float | None]:
    """(what is hung, when to look again); `awake_since`: the agent stood still before, and so may its workers have."""
    counted = [w for w in workers if w.report.in_loop and w.report.outcome == Outcome.NONE]
    if not any(w.report.first_step_at for w in counted):
        return None, None
    busy = [w for w in counted if not w.waits]
    if busy:
        behind = min(busy, key=_place)
        since = max(w.sign for w in busy if _place(w)[:-1] == _place(behind)[:-1])
        patience = behind.limit(timeout_seconds)
    else:
        behind, since = None, max(w.sign for w in counted)
        patience = _patience_of_waiting(counted, timeout_seconds)
    due = max(since, awake_since) + patience
    if now < due:
        return None, due
    if behind is None:
        return _all_wait(counted, since, now), None
    return _one_is_behind(behind, counted, now), None


def _place(worker: Seen) -> tuple[bool, int, int, float]:
    """How far on it is; the least is behind."""
    return not worker.stopped, worker.report.step, _STAGES.get(worker.phase, _OTHER_STAGE), worker.sign


def _patience_of_waiting(workers: Sequence[Seen], timeout_seconds: float) -> float:
    longest = max(worker.limit(timeout_seconds) for worker in workers)
    if _are_all(workers):
        return longest
    return _AFTER_PEERS * max(longest, _DECLARED * timeout_seconds)


def _are_all(workers: Sequence[Seen]) -> bool:
    """Whether there are no ranks on other nodes."""
    return len(workers) >= max(worker.report.world_size for worker in workers)


def _one_is_behind(behind: Seen, workers: Sequence[Seen], now: float) -> Verdict:
    others = [w.report.rank for w in workers if w is not behind and w.waits]
    stopped = "; its process is stopped (SIGSTOP, or a debugger)" if behind.stopped else ""
    waiting = f"; {_named(others)} for it" if others else ""
    where = _where(behind)
    return Verdict(
        rank=behind.report.rank,
        message=f"no progress for {now - behind.sign:.1f} s {where}{stopped}{waiting}",
        since=behind.sign,
    )


def _all_wait(workers: Sequence[Seen], since: float, now: float) -> Verdict:
    step, ranks = max(worker.report.step for worker in workers), [worker.report.rank for worker in workers]
    consequence = not _are_all(workers)
    whom = "for a rank of another node" if consequence else "for each other: their collectives do not match"
    return Verdict(
        rank=None,
        message=f"no progress for {now - since:.1f} s after step {step}: {_named(ranks)} {whom}",
        since=since,
        consequence=consequence,
    )


def _where(worker: Seen) -> str:
    report, phase = worker.report, worker.phase
    if phase in _MAY_TAKE_LONG:
        return f"in {phase.name.lower()} after step {report.step}"
    if phase is Phase.STARTING:  # a loop of the user's that does not tell
        return f"in step {report.step + 1}"
    micro_step = f", micro-step {report.micro_step + 1}" if phase in (Phase.DATA, Phase.FORWARD_BACKWARD) else ""
    return f"in {phase.name.lower()} of step {report.step + 1}{micro_step}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, sorted(ranks)))} wait"
