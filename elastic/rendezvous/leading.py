"""The leader's part: watches `nodes/`, asks `leader.lead` what to do, and does it in one transaction.

Every write of it compares the revision of `round` and the creation of its own `leader` key, so a leader that has been
replaced, or that acts on an old round, changes nothing. A new round also compares the record of the store's host and,
as far as a transaction holds them, that each member still has its key.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable, Sequence

from elastic.rendezvous.chronicle import GHOST_SECONDS, Chronicle
from elastic.rendezvous.leader import Wait, Write, lead
from elastic.rendezvous.leader_view import LeaderView, Rules, Seen, expected_settings
from elastic.rendezvous.mismatch import other_program
from elastic.rendezvous.records import Keys, News, node_of
from elastic.rendezvous.round import Node, Phase, Round
from elastic.rendezvous.store import Compare, Entry, Event, Outcome, Put, Store, Watch

logger = logging.getLogger(__name__)

_ACTS_PER_PASS = 8
_COMPARED_MEMBERS = 100
_NEWS_SECONDS = 0.3  # between two pieces of news: each goes to every node
_NEWS_SECONDS_PER_NODE = 0.004  # more, and before each: what has passed by then need not be told to a thousand nodes

Post = Callable[[Callable[[], None]], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """What a leader works with, and whoever wants to become one: the participant's own."""

    store: Store
    keys: Keys
    rules: Rules
    chronicle: Chronicle
    post: Post  # has something done by the participant's thread
    clock: Callable[[], float]  # monotonic seconds
    draw: random.Random


class Leading:
    """Made when this node has become leader; `close` when it is no more."""

    def __init__(self, office: Office, lease: int) -> None:
        """`lease`: that the keys `leader` and of this node are under."""
        self._store = office.store
        self._keys = office.keys
        self._rules = office.rules
        self._chronicle = office.chronicle
        self._post = office.post
        self._clock = office.clock
        self._draw = office.draw
        self._lease = lease
        self._watch: Watch | None = None
        self._is_loaded = False
        self._revision = 0  # of the read that `_entries` began with
        self._entries: dict[str, Entry] = {}
        self._nodes: dict[str, Seen] = {}
        self._reported: dict[tuple[str, int], tuple[int, int]] = {}  # seat -> last round stopped, last round done
        self._used = 0
        self._counted_at = -math.inf
        self._warned: set[tuple[str, int]] = set()  # seats with another program than this node's
        self._told: str | None = None
        self._told_at = -math.inf
        self._untold_since: float | None = None  # there has been other news than was told

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(seen.node for seen in self._nodes.values())

    def living_incarnation(self, now: float) -> str:
        """The round's, once one of its nodes is known to live: a ghost's key would be gone by now."""
        current = self._chronicle.round
        if current is None:
            return ""
        for seen in self._nodes.values():
            belongs = current.seat_of(seen.node.node_id, seen.node.join) is not None
            lives = now - seen.since > self._rules.ttl_seconds + GHOST_SECONDS
            if lives and (belongs or seen.node.incarnation == current.incarnation):
                return current.incarnation
        return ""

    def reload(self) -> None:
        """Read the nodes again at the next pass: something has been missed."""
        self._is_loaded = False

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def work(self, now: float, me: Node) -> tuple[bool, float | None]:
        """Do all that is due. Returns whether what is known still holds, and when to be called again.

        Not holding means: a write was refused or its fate is unknown, read everything again. `me` is this node as it
        is now. Raises: StoreUnavailableError, StoreRefusedError.
        """
        if not self._is_loaded:
            self._load(now)
        for _ in range(_ACTS_PER_PASS):
            act = lead(self._view(now))
            if isinstance(act, Wait):
                return self._tell(act, now, me)
            if not self._write(act, now, me):
                return False, now
        return True, now

    def _view(self, now: float) -> LeaderView:
        current = self._chronicle.round
        number = current.number if current is not None else 0
        reported = self._reported.items()
        return LeaderView(
            now=now,
            round=current,
            nodes=self._nodes,
            rules=self._rules,
            used=self._used,
            ended_at=self._chronicle.ended_at,
            stopped=frozenset(seat for seat, (after, _) in reported if after >= number),
            finished=frozenset(seat for seat, (_, done) in reported if done >= number),
            let_in=self._chronicle.let_in,
            new_incarnation=f"{self._draw.getrandbits(32):08x}",
        )

    # What the nodes say.

    def _load(self, now: float) -> None:
        snapshot = self._store.read(self._keys.nodes, prefix=True)
        self._revision = snapshot.revision
        self._entries = dict(snapshot.entries)
        there = {key.removeprefix(self._keys.nodes) for key in snapshot.entries}
        self._nodes = {name: seen for name, seen in self._nodes.items() if name in there}
        for entry in snapshot.entries.values():
            self._take(entry, now)
        current = self._chronicle.round
        seats = {(m.node_id, m.join) for m in current.members} if current is not None else set()
        live = {(seen.node.node_id, seen.node.join) for seen in self._nodes.values()}
        self._reported = {seat: said for seat, said in self._reported.items() if seat in seats | live}
        self._count(now)
        self._is_loaded = True
        if self._watch is None:
            self._watch = self._store.watch(
                [self._keys.nodes],
                prefix=True,
                after_revision=snapshot.revision,
                on_events=lambda events: self._post(lambda: self._on_events(events)),
                on_gap=lambda: self._post(self.reload),
            )

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.revision <= self._revision:
                continue
            if event.entry is None:
                self._entries.pop(event.key, None)
                self._nodes.pop(event.key.removeprefix(self._keys.nodes), None)
            else:
                self._entries[event.key] = event.entry
                self._take(event.entry, self._clock())

    def _take(self, entry: Entry, now: float) -> None:
        node_id = entry.key.removeprefix(self._keys.nodes)
        try:
            node = node_of(entry)
        except ValueError as exc:
            logger.error("%s: %s", entry.key, exc)
            self._nodes.pop(node_id, None)
            return
        known = self._nodes.get(node_id)
        is_same = known is not None and known.node.join == node.join
        since = known.since if known is not None and is_same else now
        ready_since = known.ready_since if known is not None and is_same else None
        if node.ready and ready_since is None:
            ready_since = now
        self._nodes[node_id] = Seen(node=node, since=since, ready_since=ready_since if node.ready else None)
        after, done = self._reported.get((node_id, node.join), (0, 0))
        self._reported[node_id, node.join] = max(after, node.after), max(done, node.done)

    # What the leader writes.

    def _write(self, act: Write, now: float, me: Node) -> bool:
        """Returns whether the round is as `act` says."""
        if act.charge:
            self._count(now)
            again = lead(self._view(now))
            if not isinstance(again, Write):
                return True
            act = again
        written = act.round
        puts = [Put(self._keys.round, written.to_json())]
        charge_lease = 0
        if act.charge and self._chronicle.round is not None:
            charge_lease = self._store.grant(max(1, math.ceil(self._rules.restart_window_seconds))).id
            key = self._keys.charge(self._chronicle.round.incarnation, self._chronicle.round.number)
            puts.append(Put(key, act.charge, charge_lease))
        outcome, revision = self._store.write(self._conditions(written, bool(act.charge)), puts)
        if outcome is not Outcome.APPLIED:
            logger.info("round %d: its write was %s; reading everything again", written.number, outcome.value)
            self.reload()
            if charge_lease and outcome is Outcome.REFUSED:
                self._store.revoke(charge_lease)
            return False
        self._used += bool(act.charge)
        if self._chronicle.round is None or self._chronicle.round.incarnation != written.incarnation:
            self._used = 0
        before = self._chronicle.round_entry
        created = before.create_revision if before is not None else revision
        entry = Entry(key=puts[0].key, value=puts[0].value, create_revision=created, mod_revision=revision)
        self._chronicle.take_round(entry, revision, now)
        logger.info("round %d is %s: %s", written.number, written.phase.value, written.cause)
        if written.phase is Phase.RUNNING:
            self._warn_of_other_programs(written, me)
        return True

    def _warn_of_other_programs(self, written: Round, me: Node) -> None:
        """Paths and arguments may differ between hosts; what differs unmeant trains wrongly without a word."""
        for member in written.members:
            seen, seat = self._nodes.get(member.node_id), (member.node_id, member.join)
            other = other_program(me.program, seen.node.program) if seen is not None else ""
            if other and seat not in self._warned:
                self._warned.add(seat)
                logger.warning(
                    "node %s runs %s: unless that is meant, give it the script and the arguments of node %s",
                    *(member.node_id, other, me.node_id),
                )

    def _conditions(self, written: Round, charge: bool) -> list[Compare]:
        """What must still be as it was seen; a charge also needs that nobody has been lost or left meanwhile."""
        entry = self._chronicle.round_entry
        conditions = [
            Compare(key=self._keys.round, mod_revision=entry.mod_revision if entry is not None else 0),
            self._own_leadership(),
        ]
        if written.phase is not Phase.RUNNING:
            return conditions
        host = self._entries[self._keys.node(written.store_host)]
        conditions.append(Compare(key=host.key, mod_revision=host.mod_revision))
        before = self._chronicle.round
        names = [member.node_id for member in (*(before.members if before and charge else ()), *written.members)]
        for name in dict.fromkeys(names[:_COMPARED_MEMBERS]):
            held = self._entries.get(self._keys.node(name))
            if held is not None and name != written.store_host:
                conditions.append(Compare(key=held.key, create_revision=held.create_revision))
        return conditions

    def _own_leadership(self) -> Compare:
        entry = self._chronicle.leader_entry
        return Compare(key=self._keys.leader, create_revision=entry.create_revision if entry is not None else -1)

    def _count(self, now: float) -> None:
        """How many charges have not left the window; their leases are its clock."""
        current = self._chronicle.round
        self._counted_at = now
        self._used = 0
        if current is not None:
            self._used = len(self._store.read(self._keys.charges(current.incarnation), prefix=True).entries)

    def _tell(self, wait: Wait, now: float, me: Node) -> tuple[bool, float | None]:
        """Publish what has changed, at a bounded rate."""
        due = [wait.until] if wait.until is not None else []
        if self._used:
            if now - self._counted_at >= self._rules.ttl_seconds:
                self._count(now)
            due.append(self._counted_at + self._rules.ttl_seconds)
        news = News(
            node_id=me.node_id,
            incarnation=me.incarnation,
            settings=expected_settings(self._view(now)),
            used=self._used,
            short=wait.short,
            waiting=wait.waiting,
            waiting_count=len(wait.waiting),
        )
        text = news.to_json()
        if text == self._told:
            self._untold_since = None
            return True, min(due, default=None)
        since = self._untold_since = now if self._untold_since is None else self._untold_since
        spread = _NEWS_SECONDS_PER_NODE * len(self._nodes)
        if now < (tell_at := max(self._told_at + _NEWS_SECONDS + spread, since + spread)):
            return True, min([*due, tell_at])
        self._told_at, self._untold_since = now, None
        outcome, revision = self._store.write([self._own_leadership()], [Put(self._keys.leader, text, self._lease)])
        if outcome is not Outcome.APPLIED:
            return False, now
        self._told = text
        before = self._chronicle.leader_entry
        if before is not None:
            entry = Entry(
                key=self._keys.leader,
                value=text,
                create_revision=before.create_revision,
                mod_revision=revision,
                lease=self._lease,
            )
            self._chronicle.take_leader(entry, revision, now)
        return True, min(due, default=None)
