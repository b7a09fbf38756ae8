"""This node's part of the protocol, as a machine without threads: `work` compares what is wanted with what is known
to be in the store and does the difference, one step after another.

Whatever an answer's fate, the next pass reads what it needs and goes on from there; nothing is sent again blindly. The
wishes (`join`, `announce`, `done`, `leave` ...) are levels, not messages: a step that failed is simply still due.

One join: lease -> own key (created, its id claimed) -> the leader's next round has a seat for it. The first time the
shared keys are read in the same transaction: of a thousand nodes that start at once each asks the store twice.
One failure: `announce` moves this node's round to broken -> everybody stops -> `join(after=...)` -> the next round.
One lost leader: its keys go with its lease -> everybody tries to create `leader` -> the one who did reads `nodes/`.
One lost answer: UNKNOWN -> `round`, `leader` and the own key are read again -> what is still missing is done.
One lost lease: the keys are gone; this node is expelled until it joins again, under a new join and without workers.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from elastic.errors import ElasticError, StoreRefusedError, StoreUnavailableError
from elastic.rendezvous.breaking import broken_by
from elastic.rendezvous.chronicle import GHOST_SECONDS, Chronicle
from elastic.rendezvous.election import Election
from elastic.rendezvous.holding import Holding, Keeper, LeaseGoneError, MakeKeeper
from elastic.rendezvous.identity import Identity
from elastic.rendezvous.leader_view import Rules
from elastic.rendezvous.leading import Office
from elastic.rendezvous.membership import Breakage
from elastic.rendezvous.mismatch import Mismatch
from elastic.rendezvous.peers import Peers
from elastic.rendezvous.records import Keys
from elastic.rendezvous.round import Node, Phase
from elastic.rendezvous.state import State
from elastic.rendezvous.store import Compare, Entry, Event, Outcome, Put, Snapshot, Store, Watch

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05  # doubling, with jitter, while the store does not answer or refuses
_LONGEST_RETRY_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a node brings along."""

    node: Node  # node id, address, slots, first number
    identity: Identity
    rules: Rules
    ttl_seconds: int
    version: str = ""
    restarted: bool = False  # by the service manager, not by an operator: it belongs to the incarnation it finds


class Participant:
    """One node. All calls come from one thread, but for `post`."""

    def __init__(
        self,
        *,
        store: Store,
        keys: Keys,
        settings: Settings,
        make_keeper: MakeKeeper,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        draw: random.Random | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._draw = draw or random.Random()
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._watch: Watch | None = None  # of the two shared keys
        self._chronicle = Chronicle()
        self._own = Holding(
            store=store,
            keys=keys,
            node=dataclasses.replace(settings.node, ready=False, settings=settings.rules.settings),
            identity=settings.identity,
            version=settings.version,
            ttl=settings.ttl_seconds,
            make_keeper=make_keeper,
            on_lost=lambda lease: self.post(lambda: self._lose() if self._own.lease == lease else None),
        )
        office = Office(
            store=store,
            keys=keys,
            rules=settings.rules,
            chronicle=self._chronicle,
            post=self.post,
            clock=clock,
            draw=self._draw,
        )
        self._election = Election(office, self._own, self._take_leader)
        self._is_joined = self._is_going = self._has_left = False
        self._incarnation = ""  # that this node has seen alive
        self._seated = 0  # the last round in which this node had a seat
        self._is_lost = False  # the lease ended while that round's workers could live
        self._breakage: tuple[int, Breakage] | None = None  # round and why, until the store knows
        self._must_read = True  # `round` and `leader`
        self._read_at = 0.0
        self._failed = 0  # passes in a row that the store let down
        self.trouble = ""  # what the last of them met; empty: none did
        self._short_since: float | None = None
        self._mismatch = Mismatch(
            run_id=keys.run_id, mine=settings.rules.settings, patience_seconds=settings.ttl_seconds + 1
        )
        self._peers = Peers(store, keys)
        self._error: ElasticError | None = None
        self._answered_at = clock()
        self.state = State(node=self._own.node, answered_at=self._answered_at)

    # What is wanted; each is done by the next `work`.

    def join(self, *, after: int, store_port: int, ready: bool) -> None:
        """There are no workers; this node wants to be in the next round.

        A round with a seat for it that is over already will not be started here: that is said as well.
        """
        join, current = self._own.node.join, self._chronicle.round
        if current is not None and current.number == self._seated and current.phase is not Phase.RUNNING:
            after = max(after, self._seated)
        if self._is_expelled():
            after, join = max(after, self._seated), 0  # a newcomer: 0 = to be numbered
        self._is_joined, self._is_lost = True, False
        self._set(
            after=after,
            join=join,
            store_port=store_port,
            ready=ready,
            incarnation=self._incarnation,
            first_number=max(self._own.node.first_number, self._chronicle.highest + 1),
        )

    def ready(self) -> None:
        self._set(ready=True)

    def announce(self, breakage: Breakage) -> None:
        if self._seated:
            self._breakage = (self._seated, breakage)

    def done(self) -> None:
        self._set(done=self._seated)

    def leaving(self) -> None:
        self._set(leaving=True)

    def leave(self) -> None:
        """The workers are gone, and this node goes."""
        self._is_going = True

    def _set(self, **changes: str | int | bool) -> None:
        if any(getattr(self._own.node, name) != value for name, value in changes.items()):
            self._own.node = dataclasses.replace(self._own.node, **changes)  # type: ignore[arg-type]  # checked by name

    # What happens.

    def post(self, happened: Callable[[], None]) -> None:
        """Have this called at the beginning of the next pass; any thread."""
        self._inbox.append(happened)
        self._wake()

    def work(self) -> float | None:
        """Do what is due. Returns when to be called again at the latest; None: only after a `post`."""
        while self._inbox:
            self._inbox.popleft()()
        now = self._clock()
        due: float | None = None
        if not self._has_left and (self._error is None or self._is_going):  # whom the job does not want goes at once
            try:
                due = self._pass(now)
                self._failed, self.trouble = 0, ""
                self._answered_at = self._clock()
            except LeaseGoneError:
                self._lose()
                due = now
            except StoreUnavailableError as exc:
                due = self._retry(now, str(exc))
            except StoreRefusedError as exc:
                self._error = exc
        self._publish(self._clock())
        return due

    def close(self) -> None:
        """Stop everything of this node here; its keys go when the lease ends, or have gone with `leave`."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._election.step_down()
        self._own.stop_renewing()

    @property
    def keeper(self) -> Keeper | None:
        """Of the newest lease; any thread."""
        return self._own.keeper

    def _retry(self, now: float, why: str) -> float:
        """Come again after a pause, and believe nothing that was known before."""
        self._failed += 1
        self.trouble = why
        self._must_read = True
        if self._failed == 1:
            logger.info("node %s: reading everything again: %s", self._own.node.node_id, why)
        pause = min(_LONGEST_RETRY_SECONDS, _RETRY_SECONDS * 2.0 ** min(self._failed - 1, 8))
        return now + pause * (0.5 + 0.5 * self._draw.random())

    def _pass(self, now: float) -> float | None:
        """One pass over everything that may be due, each step reading no more than it needs."""
        seen = None
        if self._must_read or now - self._read_at >= self._settings.ttl_seconds:
            seen = self._read(now)
        due: list[float | None] = [self._read_at + self._settings.ttl_seconds]
        if self._breakage is not None:
            due.append(self._break(now))
        if self._is_going:
            if self._breakage is None:
                self._go()
            return now
        if self._is_joined and not self._is_lost:
            if self._seated <= self._own.node.after:  # else the leader knows it from the round
                self._set(incarnation=self._incarnation)
            had_key = self._own.entry is not None
            due.append(self._own.hold(now, seen))
            if not had_key:
                self._note_seat()
                if self._own.entry is not None:
                    return now  # who leads may have been told meanwhile
        if self._own.entry is not None:
            due.append(self._lead(now))
            if self._election.leading is None:
                self._peers.read(self._chronicle.round)
        return min((time for time in due if time is not None), default=None)

    # Reading.

    def _is_fresh(self) -> bool:
        """It wants to join, knows nothing, and need not know what there was before."""
        knows_nothing = self._watch is None and not self._own.lease and not self._settings.restarted
        return knows_nothing and self._is_joined and not self._is_lost and not self._is_going and not self._breakage

    def _read(self, now: float) -> Snapshot:
        """Read the two shared keys and the one that is to be this node's; the first time, watch the two from there."""
        is_first = self._watch is None
        takes = {self._keys.round: self._take_round, self._keys.leader: self._take_leader}
        found = self._own.enter(list(takes)) if self._is_fresh() else None
        if found is None:
            found = self._store.read(*takes, self._own.wanted_key)
        if self._chronicle.is_newer_than(found.revision):
            logger.warning("node %s: etcd was put back to an older state: going on from that", self._own.node.node_id)
            self._chronicle.forget_revisions()
            self._own.look_again()
        for key, take in takes.items():
            take(found.get(key), found.revision, is_first)
        if self._watch is None:
            self._watch = self._watch_both(found.revision, takes)
        self._must_read, self._read_at = False, now
        if is_first and self._settings.restarted and self._chronicle.round is not None:
            self._incarnation = self._chronicle.round.incarnation
        return found

    def _watch_both(self, after: int, takes: Mapping[str, Callable[[Entry | None, int, bool], None]]) -> Watch:
        def told(events: Sequence[Event]) -> None:
            newest = events[-1]  # all are of one key
            self.post(lambda: takes[newest.key](newest.entry, newest.revision, False))

        return self._store.watch(
            list(takes), after_revision=after, on_events=told, on_gap=lambda: self.post(self._on_gap)
        )

    def _on_gap(self) -> None:
        self._must_read = True

    def _take_round(self, entry: Entry | None, revision: int, is_first: bool = False) -> None:
        if self._chronicle.take_round(entry, revision, self._clock()):
            self._note_round(is_first)

    def _note_round(self, is_first: bool = False) -> None:
        """A round that changes before our eyes lives, and so does its incarnation."""
        current = self._chronicle.round
        if current is not None and not is_first:
            self._incarnation = current.incarnation
        self._note_seat()

    def _note_seat(self) -> None:
        current, node = self._chronicle.round, self._own.node
        if self._own.entry is None or current is None or current.seat_of(node.node_id, node.join) is None:
            return
        self._seated, self._incarnation = current.number, current.incarnation

    def _take_leader(self, entry: Entry | None, revision: int, is_first: bool = False) -> None:
        """One that tells something before our eyes lives, and one whose key outlasts a lease."""
        now = self._clock()
        is_new = self._chronicle.take_leader(entry, revision, now) and not is_first
        lasts = now - self._chronicle.leader_since > self._settings.ttl_seconds + GHOST_SECONDS
        news, current = self._chronicle.news, self._chronicle.round
        if (is_new or lasts) and news and current is not None and news.incarnation == current.incarnation:
            self._incarnation = news.incarnation

    # The lease.

    def _lose(self) -> None:
        """The lease has ended, and all keys under it with it. Workers may live: then the agent is to end them first."""
        logger.warning("node %s: its lease has ended", self._own.node.node_id)
        self._election.step_down()
        self._own.forget()
        self._chronicle.forget_revisions()
        self._must_read = True
        self._is_lost = self._seated > self._own.node.after

    def _is_expelled(self) -> bool:
        """The round that this node was last seated in is over for it, though it has not said that it stopped."""
        node, current = self._own.node, self._chronicle.round
        if self._seated <= node.after:
            return False
        if self._is_lost or current is None:
            return True
        return current.number >= self._seated and current.seat_of(node.node_id, node.join) is None

    # The round.

    def _break(self, now: float) -> float | None:
        """Move the round that broke to broken, or add to why it did."""
        number, breakage = self._breakage or (0, None)
        current, entry = self._chronicle.round, self._chronicle.round_entry
        broken = broken_by(current, breakage) if breakage and current and current.number == number else current
        if broken is None or broken == current or entry is None:
            self._breakage = None
            return None
        text = broken.to_json()
        unchanged = Compare(key=entry.key, mod_revision=entry.mod_revision)
        outcome, revision = self._store.write([unchanged], [Put(entry.key, text)])
        if outcome is not Outcome.APPLIED:
            self._must_read = True
            return now
        self._breakage = None
        logger.info("round %d is %s: %s", number, broken.phase.value, broken.cause)
        self._take_round(dataclasses.replace(entry, value=text, mod_revision=revision), revision)
        return None

    # Leading.

    def _lead(self, now: float) -> float | None:
        """Lead if this node does; else see to it that somebody does."""
        leads, due = self._election.work(now, self._incarnation)
        leading = self._election.leading
        if not leads or leading is None:
            self._must_read = self._must_read or due == now
            return due
        before = self._chronicle.round
        self._incarnation = leading.living_incarnation(now) or self._incarnation
        holds, due = leading.work(now, dataclasses.replace(self._own.node, incarnation=self._incarnation))
        if self._chronicle.round != before:
            self._note_round()
            due = now
        if not holds:
            raise StoreUnavailableError("a write of the leader was refused or had no answer")
        return due

    def _go(self) -> None:
        """Say that the workers are gone, then let go of everything at once."""
        if self._own.entry is not None and self._own.node.after < self._seated:
            self._set(after=self._seated)
        self._own.write()
        self._own.give_up()
        self._election.step_down()
        self._is_joined = False
        self._has_left = True

    # What the agent sees.

    def _publish(self, now: float) -> None:
        current, news, node = self._chronicle.round, self._chronicle.news, self._own.node
        seat = current.seat_of(node.node_id, node.join) if current is not None else None
        is_seated = seat is not None and current is not None and node.after < current.number
        is_short = self._is_joined and not is_seated and (news is None or bool(news.short))
        self._short_since = (self._short_since if self._short_since is not None else now) if is_short else None
        self._error = self._error or self._mismatch.look(news if self._is_joined else None, now)
        concerns = current is not None and (seat is not None or current.incarnation == self._incarnation)
        self.state = State(
            node=node,
            round=current if concerns else None,
            nodes=self._election.leading.nodes
            if self._election.leading is not None
            else (self._peers.nodes or (node,)),
            news=news,
            is_joined=self._is_joined,
            is_leader=self._election.leading is not None,
            is_expelled=self._is_expelled(),
            incarnation=self._incarnation,
            short_since=self._short_since,
            answered_at=self._answered_at,
            error=self._error,
            has_left=self._has_left,
        )
