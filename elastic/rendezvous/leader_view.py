"""What a leader sees, and who in it may be in the next round: the data and the rules that `leader.lead` decides on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic.rendezvous.membership import Waiting
from elastic.rendezvous.mismatch import differences
from elastic.rendezvous.round import Flaky, Limits, Member, Node, Phase, Round

_LONGEST_PROBATION_SECONDS = 600.0
_FLAKY_KEPT = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that the leader goes by; the same on every node of a job."""

    limits: Limits
    last_call_seconds: float = 5.0
    settle_seconds: float = 1.0
    drain_grace_seconds: float = 120.0
    ttl_seconds: float = 5.0
    max_restarts: int = 3
    restart_window_seconds: float = 600.0
    probation_window_seconds: float = 60.0  # a node lost this soon after being let in has to wait
    probation_seconds: float = 5.0  # for so long the first time, then twice as long each time
    settings: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A live node, and since when the leader has seen this join of it, and seen it ready."""

    node: Node
    since: float
    ready_since: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderView:
    """All that the decision depends on. A seat is a node id with its join."""

    now: float
    round: Round | None
    nodes: Mapping[str, Seen]
    rules: Rules
    used: int = 0  # charges that count now
    ended_at: float = 0.0  # when `round` was first seen not running
    stopped: frozenset[tuple[str, int]] = frozenset()  # seats that had stopped the round before they went
    finished: frozenset[tuple[str, int]] = frozenset()  # seats that were done with the round before they went
    let_in: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)  # seats that joined a live job
    new_incarnation: str = ""  # the name of one, if it is needed


def expected_settings(view: LeaderView) -> str:
    """The settings that a node must have: those of the living round, else the leader's own."""
    current = view.round
    if current is not None and current.phase is not Phase.CLOSED and any(live(view, m) for m in current.members):
        return current.settings
    return view.rules.settings


def live(view: LeaderView, member: Member) -> Seen | None:
    """The member, if this join of it still holds its key."""
    seen = view.nodes.get(member.node_id)
    return seen if seen is not None and seen.node.join == member.join else None


def seat_of(member: Member) -> tuple[str, int]:
    return member.node_id, member.join


def admissible(view: LeaderView, current: Round | None) -> list[Seen]:
    """Who may be in the next round: not leaving, same settings, no workers of an older round."""
    expected = expected_settings(view)
    found = []
    for seen in view.nodes.values():
        node = seen.node
        if node.leaving or node.settings != expected:
            continue
        if current is not None:
            is_member = current.seat_of(node.node_id, node.join) is not None
            if current.phase is Phase.CLOSED and (is_member or node.incarnation == current.incarnation):
                continue
            if (is_member and node.after < current.number) or (node.node_id, node.join) in current.late:
                continue
        found.append(seen)
    return found


def late_seats(view: LeaderView, current: Round | None) -> tuple[tuple[str, int], ...]:
    """Seats whose workers may still run: they come back with another join."""
    if current is None:
        return ()
    late = [*current.late]
    for member in current.members:
        seen = live(view, member)
        if seen is not None and seen.node.after < current.number:
            late.append(seat_of(member))
    return tuple(seat for seat in late if (seen := view.nodes.get(seat[0])) and seen.node.join == seat[1])


def has_left(view: LeaderView, current: Round, member: Member) -> bool:
    """Whether a member that is gone had said so: that it stopped, or, to a leader before this one, that it leaves."""
    return seat_of(member) in view.stopped or member.node_id in current.leaving


def gone_cause(view: LeaderView, current: Round, gone: Sequence[Member]) -> str:
    left = [member.node_id for member in gone if has_left(view, current, member)]
    lost = [member.node_id for member in gone if not has_left(view, current, member)]
    parts = [f"{named(lost)} lost"] if lost else []
    return ", ".join([*parts, f"{named(left)} left"] if left else parts)


def doing(node_ids: Sequence[str], does: str, do: str) -> str:
    """ "node a joins", "nodes a, b join"."""
    return f"{named(node_ids)} {does if len(node_ids) == 1 else do}"


def named(node_ids: Sequence[str]) -> str:
    """ "node a", "nodes a, b", "nodes a, b, c and 7 more"."""
    shown = ", ".join(node_ids[:3]) + (f" and {len(node_ids) - 3} more" if len(node_ids) > 3 else "")
    return f"node{'s' if len(node_ids) != 1 else ''} {shown}"


def probation_ends(view: LeaderView, current: Round, seen: Seen) -> float:
    """When a node that was lost soon after it had been let in may be let in again; the past for all others."""
    if current.seat_of(seen.node.node_id, seen.node.join) is not None:
        return seen.since
    losses = next((flaky.losses for flaky in current.flaky if flaky.node_id == seen.node.node_id), 0)
    if not losses:
        return seen.since
    pause = view.rules.probation_seconds * 2.0 ** min(losses - 1, 16)
    return seen.since + min(pause, _LONGEST_PROBATION_SECONDS)


def flaky_nodes(view: LeaderView, current: Round, gone: Sequence[Member]) -> tuple[Flaky, ...]:
    """The record of who is lost soon after being let in; it is cleared by staying for the whole window."""
    losses = {flaky.node_id: flaky.losses for flaky in current.flaky}
    for member in current.members:
        let_in = view.let_in.get(seat_of(member))
        stayed = let_in is not None and view.ended_at - let_in >= view.rules.probation_window_seconds
        if member in gone and not has_left(view, current, member) and let_in is not None and not stayed:
            losses[member.node_id] = losses.get(member.node_id, 0) + 1
        elif member not in gone and stayed:
            losses.pop(member.node_id, None)
    return tuple(Flaky(node_id=name, losses=count) for name, count in losses.items())[-_FLAKY_KEPT:]


def outside(view: LeaderView, current: Round | None, reason: str) -> tuple[Waiting, ...]:
    """Everybody who is there and in no running round, each with its reason; `reason` for those without another."""
    expected = expected_settings(view)
    running = current is not None and current.phase is Phase.RUNNING
    waiting = []
    for seen in view.nodes.values():
        node = seen.node
        is_member = current is not None and current.seat_of(node.node_id, node.join) is not None
        if is_member and current is not None and (running or node.after < current.number):
            continue
        if current is not None and current.phase is Phase.CLOSED and node.incarnation == current.incarnation:
            continue
        own = _own_reason(view, current, seen, expected) if not is_member else ""
        waiting.append(Waiting(node_id=node.node_id, reason=own or reason))
    return tuple(waiting)


def _own_reason(view: LeaderView, current: Round | None, seen: Seen, expected: str) -> str:
    node = seen.node
    if node.settings != expected:
        return f"its settings differ from the job's: {differences(node.settings, expected)}"
    if node.leaving:
        return "it is leaving"
    if current is not None and probation_ends(view, current, seen) > view.now:
        return f"back-off: it was lost within {view.rules.probation_window_seconds:g} s of being let in"
    if not node.ready and current is not None and current.phase is Phase.RUNNING:  # no other round waits for that
        return "it is getting ready"
    return ""
