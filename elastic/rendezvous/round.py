"""What a round is and which one comes next: functions of data, without clocks, stores or processes.

A round is one formation of the job: its members, their ranks, its store. Its number is the fencing token, so it only
grows; its phase only moves right. Invariants, which the tests check after every transition:

- a number belongs to one round, and a later round has a higher number;
- a node that stays keeps its node rank as long as that rank exists in the new round;
- the next round is decided only when every member of the last one has stopped its workers or is gone;
- at most `limits.max_nodes` are members; who is over that waits as a spare.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Phase(str, enum.Enum):
    """Where a round is in its life; only moves down this list."""

    RUNNING = "running"
    DRAINING = "draining"
    BROKEN = "broken"
    CLOSED = "closed"


_ORDER = {phase: position for position, phase in enumerate(Phase)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many nodes a round may have."""

    min_nodes: int
    max_nodes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node says of itself; lives as long as the node's lease."""

    node_id: str
    addr: str
    slots: int  # local workers
    join: int = 1  # grows each time that this node comes anew: its agent started, or its lease was lost
    after: int = 0  # the last round whose workers it has stopped
    store_port: int = 0  # a TCPStore server it holds open for the next round
    ready: bool = True  # its standbys are warm
    done: int = 0  # the round whose workers have finished the training
    leaving: bool = False  # it drains and will not be in the next round
    incarnation: str = ""  # the incarnation it has seen alive; "" = it has just been started
    first_number: int = 1  # above every round that its checkpoints know
    settings: str = ""  # the flags that all nodes must agree on
    program: str = ""  # its script's name and a checksum of the arguments
    http: str = ""  # HOST:PORT of its agent's HTTP server, as others reach it; empty: they do not


class Member(NamedTuple):
    """A node's seat in a round; the position in `Round.members` is its node rank.

    A tuple, for each of a thousand nodes makes a thousand of them from the text of a round.
    """

    node_id: str
    join: int
    slots: int


_seated = functools.partial(
    tuple.__new__, Member
)  # of a list, whatever is in it: a third of the time of `Member(*seat)`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flaky:
    """A node that was lost soon after it had been let in, and how often in a row."""

    node_id: str
    losses: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One formation of the job, the same on every node."""

    number: int
    incarnation: str
    phase: Phase
    cause: str
    members: tuple[Member, ...]
    store_host: str = ""  # node id of the store's host
    store_addr: str = ""
    store_port: int = 0
    outcome: str = ""
    exit_code: int = 0  # of a job that has failed, where it is known
    charged: bool = False  # what broke it takes from the budget
    progressed: bool = False  # it had applied a new step before it broke
    consequence: bool = False  # its cause looks like the loss of a peer: a better one may still come
    failed_before: float = 0.0  # seconds from what broke it to the word of it
    failures: int = 0  # failures without progress, in a row, before this round
    leaving: tuple[str, ...] = ()  # members that had said so before they stopped
    flaky: tuple[Flaky, ...] = ()
    late: tuple[tuple[str, int], ...] = ()  # node id and join of who was left out for not stopping in time
    settings: str = ""
    _node_ranks: Mapping[str, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranks = {member.node_id: rank for rank, member in enumerate(self.members)}
        object.__setattr__(self, "_node_ranks", ranks)  # asked for by each of N nodes, for each of N by the leader

    @property
    def world_size(self) -> int:
        return sum(member.slots for member in self.members)

    def node_rank(self, node_id: str) -> int | None:
        """Position of the node in this round, None when it is no member."""
        return self._node_ranks.get(node_id)

    def ranks(self, node_id: str) -> range:
        """Global ranks of the node's workers; empty when it is no member."""
        first = 0
        for member in self.members:
            if member.node_id == node_id:
                return range(first, first + member.slots)
            first += member.slots
        return range(0)

    def seat_of(self, node_id: str, join: int) -> int | None:
        """Node rank of this very join of the node, None when it is no member."""
        rank = self.node_rank(node_id)
        return rank if rank is not None and self.members[rank].join == join else None

    def to_json(self) -> str:
        """Compact, for every node reads it: a member is a list, what is as always is left out."""
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.init and (field.default is dataclasses.MISSING or getattr(self, field.name) != field.default)
        }
        fields["members"] = self.members
        if self.flaky:
            fields["flaky"] = [(flaky.node_id, flaky.losses) for flaky in self.flaky]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Round:
        """Keys that a newer version has added are ignored. Raises: ValueError when `text` is not a round."""
        try:
            fields: dict[str, Any] = json.loads(text)
            members = tuple(map(_seated, fields.pop("members")))
            flaky = tuple(Flaky(node_id=i, losses=losses) for i, losses in fields.pop("flaky", ()))
            leaving = tuple(fields.pop("leaving", ()))
            late = tuple((i, join) for i, join in fields.pop("late", ()))
            phase = Phase(fields.pop("phase"))
            rest = {name: value for name, value in fields.items() if name in _ROUND_TYPES}
            are_right = all(type(value).__name__ == _ROUND_TYPES[name] for name, value in rest.items())
            if not are_right or not _are_seats(members):
                raise TypeError("a value is of another type")
            return cls(phase=phase, members=members, flaky=flaky, leaving=leaving, late=late, **rest)
        except (TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise ValueError(f"not a round record: {text[:200]!r}") from exc


_ROUND_TYPES = {field.name: str(field.type) for field in dataclasses.fields(Round) if field.init}


def _are_seats(members: Sequence[Member]) -> bool:
    """Whether a thousand of them, a thousand times over, have the types that they should."""
    kinds = [set(map(type, column)) for column in zip(*members, strict=True)]
    return not members or kinds == [{str}, {int}, {int}]


def advance(current: Round, phase: Phase, cause: str, outcome: str = "") -> Round:
    """The round moved to `phase`, or itself when it is there or further already: the first cause stands."""
    if _ORDER[phase] <= _ORDER[current.phase]:
        return current
    return dataclasses.replace(current, phase=phase, cause=cause, outcome=outcome)


def all_stopped(current: Round, nodes: Mapping[str, Node]) -> bool:
    """Whether every member has stopped the round's workers, or is gone and so are they.

    Who is done has no workers left either; but unless the round is closed it is to join again before the next one.
    """

    def has_stopped(node: Node) -> bool:
        closed_and_done = current.phase is Phase.CLOSED and node.done >= current.number
        return node.after >= current.number or closed_and_done

    present = (nodes.get(member.node_id) for member in current.members)
    return all(
        node is None or node.join != member.join or has_stopped(node)
        for node, member in zip(present, current.members, strict=True)
    )


def seat(previous: Sequence[Member], candidates: Collection[Node], max_nodes: int) -> tuple[Member, ...]:
    """Members of the next round in rank order.

    Who was a member goes first, in the old order, and keeps its rank where that still exists; the others fill the
    holes, by join counter and name, which is the same order on every node.
    """
    by_id = {node.node_id: node for node in candidates}
    veterans = [by_id[member.node_id] for member in previous if member.node_id in by_id]
    known = {node.node_id for node in veterans}
    newcomers = sorted((n for n in candidates if n.node_id not in known), key=lambda n: (n.join, n.node_id))
    chosen = (veterans + newcomers)[:max_nodes]
    seats: list[Node | None] = [None] * len(chosen)
    old_rank = {member.node_id: rank for rank, member in enumerate(previous)}
    homeless = []
    for node in chosen:
        rank = old_rank.get(node.node_id, len(seats))
        if rank < len(seats):
            seats[rank] = node
        else:
            homeless.append(node)
    holes = iter(homeless)
    filled = [node if node is not None else next(holes) for node in seats]
    return tuple(Member(node_id=n.node_id, join=n.join, slots=n.slots) for n in filled)


def next_round(
    current: Round | None,
    nodes: Mapping[str, Node],
    limits: Limits,
    *,
    incarnation: str,
    first_number: int,
    cause: str,
) -> Round | None:
    """The round that follows `current`, or None while it cannot be decided yet.

    `first_number` is 1 + the highest round known to store and checkpoints: the number of an incarnation's first round.
    None means: members of `current` still run workers, fewer than MIN nodes are there, or the incarnation is closed.
    """
    if current is not None and not all_stopped(current, nodes):
        return None
    if current is not None and current.phase is Phase.CLOSED and current.incarnation == incarnation:
        return None
    candidates = [
        node for node in nodes.values() if current is None or node.after >= current.number or _is_new(node, current)
    ]
    if len(candidates) < limits.min_nodes:
        return None
    return form(current, candidates, limits, incarnation=incarnation, first_number=first_number, cause=cause)


def form(
    current: Round | None,
    candidates: Collection[Node],
    limits: Limits,
    *,
    incarnation: str,
    first_number: int,
    cause: str,
) -> Round:
    """The round of these nodes that follows `current`; node rank 0 hosts its store."""
    members = seat(current.members if current else (), candidates, limits.max_nodes)
    host = next(node for node in candidates if node.node_id == members[0].node_id)
    return Round(
        number=max(first_number, current.number + 1 if current else 0),
        incarnation=incarnation,
        phase=Phase.RUNNING,
        cause=cause,
        members=members,
        store_host=host.node_id,
        store_addr=host.addr,
        store_port=host.store_port,
        settings=host.settings,
    )


def _is_new(node: Node, current: Round) -> bool:
    return all(member.node_id != node.node_id or member.join != node.join for member in current.members)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Failures the job may have: at most `limit` charges within a rolling window. Times are seconds of one clock."""

    limit: int
    window_seconds: float
    charges: tuple[float, ...] = ()

    def used(self, now: float) -> int:
        return sum(1 for time in self.charges if now - time < self.window_seconds)

    def charge(self, now: float) -> Budget:
        """One more failure at `now`; charges that left the window are forgotten."""
        kept = tuple(time for time in self.charges if now - time < self.window_seconds)
        return dataclasses.replace(self, charges=(*kept, now))

    def is_spent(self, now: float) -> bool:
        """Whether the failures charged so far are more than may be answered by a restart."""
        return self.used(now) > self.limit


def budget_spent(failures: int, limit: int, window_seconds: float, cause: str) -> str:
    """Why a job ends with the failure that was one too many."""
    within = f"{failures} failure{'s' if failures != 1 else ''} within {window_seconds:g} s"
    return f"restart budget spent: {within}, --max-restarts is {limit}: {cause}"


def backoff_seconds(
    failures_without_progress: int, jitter: float, *, first: float = 0.5, longest: float = 30.0
) -> float:
    """Pause before the next round: none after a round that made progress, then doubling, with full half jitter.

    `jitter` is a draw from [0, 1), so that nodes and jobs that failed together do not come back together.
    """
    if failures_without_progress <= 0:
        return 0.0
    bound = min(longest, first * 2.0 ** min(failures_without_progress - 1, 16))
    return float(bound * (0.5 + 0.5 * jitter))
