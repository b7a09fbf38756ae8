"""What a leader does next: one pure function from what it sees to one write of the round, or to a wait.

    nobody of the last round is left -> last call -> the first round of this or of a new incarnation
    running    -> a member is gone: broken | one leaves or stops, a newcomer is ready: draining | all done: closed
    draining,
    broken     -> all have stopped, or are late -> budget spent: closed | back-off, MIN nodes -> the next round
    closed     -> all have stopped -> those that were started since then begin a new incarnation

Invariants, which the model test checks after every event of random histories:

- a number belongs to one round; the phase of a round only moves right;
- a round has members only that hold their seats: same join, no end of the lease seen, workers of older rounds stopped,
  or so late (grace + 2 ttl) that their fence has passed them by or their agent has been told to kill;
- a failure is charged once, with the write that answers it, and never when a member was lost or left in its round;
- a wait always ends: by an event of a node, or at the time it names.

The times are those of one monotonic clock, the leader's own: a new leader measures anew and so only waits longer.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from elastic.rendezvous.leader_view import (
    LeaderView,
    Seen,
    admissible,
    doing,
    flaky_nodes,
    gone_cause,
    has_left,
    late_seats,
    live,
    named,
    outside,
    probation_ends,
    seat_of,
)
from elastic.rendezvous.membership import Waiting
from elastic.rendezvous.round import (
    Member,
    Phase,
    Round,
    advance,
    all_stopped,
    backoff_seconds,
    budget_spent,
    form,
)

_SETTLES = 5  # a stream of newcomers delays the first of them by so many settle times at most


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Write this round in the place of the one seen."""

    round: Round
    charge: str = ""  # cause of the failure that is charged with it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do before the next event, or before the time `until`."""

    until: float | None = None
    short: str = ""  # fewer than MIN nodes: how many
    waiting: tuple[Waiting, ...] = ()


def lead(view: LeaderView) -> Write | Wait:
    """The next act of the leader."""
    current = view.round
    if current is None:
        return _first(view)
    if current.phase is Phase.CLOSED:
        return _after_close(view, current)
    if not any(live(view, member) for member in current.members):
        return _first(view)
    return _while_running(view, current) if current.phase is Phase.RUNNING else _between(view, current)


# A round is running.


def _while_running(view: LeaderView, current: Round) -> Write | Wait:
    gone = [member for member in current.members if not live(view, member)]
    if _all_done(view, current):
        return Write(round=advance(current, Phase.CLOSED, "all members are done", outcome="succeeded"))
    if unexpected := [member for member in gone if seat_of(member) not in view.finished]:
        return Write(round=_broken(current, gone_cause(view, current, unexpected)))
    members = [view.nodes[member.node_id].node for member in current.members if member not in gone]
    leaving = tuple(node.node_id for node in members if node.leaving)
    if leaving:
        return Write(round=_draining(current, doing(leaving, "leaves", "leave"), leaving))
    if stopped := [node.node_id for node in members if node.after >= current.number]:
        return Write(round=_draining(current, doing(stopped, "has stopped", "have stopped")))
    if gone or any(node.done >= current.number for node in members):
        return Wait(waiting=outside(view, current, "the job is about to end"))
    return _let_in(view, current)


def _let_in(view: LeaderView, current: Round) -> Write | Wait:
    """Newcomers are let in together, once the last of them has been ready for a while, if there are seats."""
    free = view.rules.limits.max_nodes - len(current.members)
    if free <= 0:
        return Wait(waiting=outside(view, current, "spare: there are MAX nodes without it"))
    waiting = outside(view, current, "it is let in at the next step boundary")
    allowed = [(seen, probation_ends(view, current, seen)) for seen in admissible(view, current)]
    ready = [seen.ready_since for seen, due in allowed if seen.ready_since is not None and due <= view.now]
    later = [due for seen, due in allowed if seen.ready_since is not None and due > view.now]
    if not ready:
        return Wait(until=min(later, default=None), waiting=waiting)
    settle = view.rules.settle_seconds
    due = min(max(ready) + settle, min(ready) + _SETTLES * settle)
    if view.now < due:
        return Wait(until=due, waiting=waiting)
    names = [seen.node.node_id for seen, until in allowed if seen.ready_since is not None and until <= view.now]
    return Write(round=_draining(current, doing(sorted(names)[:free], "joins", "join")))


# A round is over: it drains or is broken.


def _between(view: LeaderView, current: Round) -> Write | Wait:
    nodes = {name: seen.node for name, seen in view.nodes.items()}
    stopped = all_stopped(current, nodes)
    if current.phase is Phase.DRAINING:
        if _all_done(view, current):
            return Write(round=advance(current, Phase.CLOSED, "all members are done", outcome="succeeded"))
        if more := _leaving_as_well(view, current):  # for the next leader, should this one be among those that go
            return Write(round=dataclasses.replace(current, leaving=current.leaving + more))
        if not stopped and (broken := _broken_drain(view, current)):
            return Write(round=broken)
    late_at = view.ended_at + view.rules.drain_grace_seconds + 2 * view.rules.ttl_seconds
    if not stopped and view.now < late_at:
        busy = [m.node_id for m in current.members if (seen := live(view, m)) and seen.node.after < current.number]
        why = f"workers still run on {named(busy)}"
        return Wait(until=late_at, waiting=outside(view, current, why))
    return _follow(view, current)


def _leaving_as_well(view: LeaderView, current: Round) -> tuple[str, ...]:
    """Members that say so only since the round drains."""
    members = (member for member in current.members if member.node_id not in current.leaving)
    return tuple(m.node_id for m in members if (seen := live(view, m)) is not None and seen.node.leaving)


def _broken_drain(view: LeaderView, current: Round) -> Round | None:
    """Who is lost leaves the others in collectives that cannot end; who is done waits, and is told to join again."""
    lost = [
        member
        for member in current.members
        if not live(view, member) and seat_of(member) not in view.finished and not has_left(view, current, member)
    ]
    if lost:
        return _broken(current, gone_cause(view, current, lost))
    present = [seen.node for member in current.members if (seen := live(view, member))]
    if all(node.after >= current.number or node.done >= current.number for node in present):
        return _broken(current, f"{current.cause}; some members are done and some are not")
    return None


def _follow(view: LeaderView, current: Round) -> Write | Wait:
    """The round that answers the end of `current`: charge it, slow down, gather MIN nodes."""
    gone = [member for member in current.members if not live(view, member)]
    current = dataclasses.replace(current, flaky=flaky_nodes(view, current, gone))
    charged = current.phase is Phase.BROKEN and current.charged and not gone
    rules = view.rules
    if charged and view.used + 1 > rules.max_restarts:
        cause = budget_spent(view.used + 1, rules.max_restarts, rules.restart_window_seconds, current.cause)
        closed = advance(current, Phase.CLOSED, cause, outcome="failed")
        return Write(round=dataclasses.replace(closed, exit_code=1), charge=current.cause)
    failures = _failures(current, charged)
    jitter = random.Random(f"{current.incarnation}/{current.number}").random()  # the same for the next leader
    # The first failure after progress is answered at once; only a failure that repeats is slowed down.
    pause = backoff_seconds(failures - 1, jitter) if charged else 0.0
    if view.now < view.ended_at + pause:
        why = f"back-off of {pause:.1f} s after {failures} failures without progress"
        return Wait(until=view.ended_at + pause, waiting=outside(view, current, why))
    candidates = admissible(view, current)
    due = {seen.node.node_id: probation_ends(view, current, seen) for seen in candidates}
    allowed = [seen for seen in candidates if due[seen.node.node_id] <= view.now]
    least = rules.limits.min_nodes
    prompt = [s for s in allowed if s.node.ready or current.seat_of(s.node.node_id, s.node.join) is not None]
    chosen = prompt if len(prompt) >= least else allowed
    if len(chosen) < least:
        until = min((time for time in due.values() if time > view.now), default=None)
        short = f"{len(chosen)} of {least} nodes"
        why = f"{short} are there" + (f", {gone_cause(view, current, gone)}" if gone else "")
        return Wait(until=until, short=short, waiting=outside(view, current, why))
    following = _form(view, current, chosen, incarnation=current.incarnation, cause=_cause_of_next(view, current))
    following = dataclasses.replace(following, failures=failures, flaky=current.flaky)
    return Write(round=following, charge=current.cause if charged else "")


def _failures(current: Round, charged: bool) -> int:
    """Failures in a row without progress, with this round's."""
    if charged:
        return 1 if current.progressed else current.failures + 1
    return 0 if current.progressed else current.failures


def _cause_of_next(view: LeaderView, current: Round) -> str:
    """A lost node explains what looked like the loss of a peer."""
    gone = [member for member in current.members if not live(view, member) and seat_of(member) not in view.finished]
    if gone and (current.phase is not Phase.BROKEN or current.consequence):
        return gone_cause(view, current, gone)
    return current.cause


# Nobody of the last round is left.


def _after_close(view: LeaderView, current: Round) -> Write | Wait:
    """A new incarnation waits for the workers of the closed one, as any round does for those of the last."""
    nodes = {name: seen.node for name, seen in view.nodes.items()}
    late_at = view.ended_at + view.rules.drain_grace_seconds + 2 * view.rules.ttl_seconds
    if not all_stopped(current, nodes) and view.now < late_at:
        why = f"the last incarnation has {current.outcome or 'ended'} and stops its workers"
        return Wait(until=late_at, waiting=outside(view, current, why))
    return _first(view)


def _first(view: LeaderView) -> Write | Wait:
    current, limits = view.round, view.rules.limits
    candidates = admissible(view, current)
    if len(candidates) < limits.min_nodes:
        short = f"{len(candidates)} of {limits.min_nodes} nodes"
        # When nobody is to come any more there is nobody to wait for either: a closed job ends.
        why = f"{short} are there"
        return Wait(short=short if candidates else "", waiting=outside(view, current, why))
    enough_at = sorted(seen.since for seen in candidates)[limits.min_nodes - 1]
    due = enough_at + view.rules.last_call_seconds
    if len(candidates) < limits.max_nodes and view.now < due:
        why = f"last call: {len(candidates)} of at most {limits.max_nodes} nodes are there"
        return Wait(until=due, waiting=outside(view, current, why))
    closed = current is not None and current.phase is Phase.CLOSED
    if current is not None and not closed and _is_known(view, candidates, current):
        cause = gone_cause(view, current, current.members)
        following = _form(view, current, candidates, incarnation=current.incarnation, cause=cause)
        return Write(round=dataclasses.replace(following, failures=current.failures, flaky=current.flaky))
    return Write(round=_form(view, current, candidates, incarnation=view.new_incarnation, cause="started"))


def _is_known(view: LeaderView, candidates: Sequence[Seen], current: Round) -> bool:
    """Whether one of these nodes has lived in the round's incarnation, which then goes on."""
    return any(seen.node.incarnation == current.incarnation for seen in candidates)


# Shared.


def _all_done(view: LeaderView, current: Round) -> bool:
    """Whether every member has finished, at least one of them still here to say so."""

    def is_done(member: Member) -> bool:
        seen = live(view, member)
        return seen.node.done >= current.number if seen is not None else seat_of(member) in view.finished

    return all(is_done(member) for member in current.members)


def _form(view: LeaderView, current: Round | None, chosen: list[Seen], *, incarnation: str, cause: str) -> Round:
    nodes = [seen.node for seen in chosen]
    following = form(
        current,
        nodes,
        view.rules.limits,
        incarnation=incarnation,
        first_number=max(node.first_number for node in nodes),
        cause=cause,
    )
    return dataclasses.replace(following, late=late_seats(view, current))


def _broken(current: Round, cause: str) -> Round:
    broken = advance(current, Phase.BROKEN, cause)
    return dataclasses.replace(broken, charged=False, progressed=False, consequence=False)


def _draining(current: Round, cause: str, leaving: tuple[str, ...] = ()) -> Round:
    return dataclasses.replace(advance(current, Phase.DRAINING, cause), leaving=leaving)
