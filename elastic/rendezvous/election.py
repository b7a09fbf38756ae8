"""Who leads: whoever creates the key `leader` under its lease; it goes with that lease, and then everybody tries again.

While this node leads, its `Leading` does the leader's work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from elastic.rendezvous.holding import Holding, LeaseGoneError
from elastic.rendezvous.leading import Leading, Office
from elastic.rendezvous.records import News
from elastic.rendezvous.store import Compare, Delete, Entry, Outcome, Put

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_SPREAD_SECONDS = 0.0005  # per node, of as many as may come at first: a thousand do not all ask at once who leads


class Election:
    """This node's part in it; used by the participant's thread while the node's key stands."""

    def __init__(self, office: Office, own: Holding, take_leader: Callable[[Entry | None, int], None]) -> None:
        """`take_leader` is told of the key `leader` at a revision, as by a watch of it."""
        self._office = office
        self._own = own
        self._take_leader = take_leader
        self._try_at: float | None = None
        self.leading: Leading | None = None  # while this node leads

    def work(self, now: float, incarnation: str) -> tuple[bool, float | None]:
        """Take the lead if nobody has it. Returns whether this node leads, and when to try.

        Raises: LeaseGoneError, StoreUnavailableError, StoreRefusedError.
        """
        leader = self._office.chronicle.leader_entry
        if leader is not None and leader.lease == self._own.lease:
            self._begin()
            return True, None
        self.step_down()
        if leader is not None:
            self._try_at = None
            return False, None if leader.lease else self._remove(leader, now)
        if self._try_at is None:
            current = self._office.chronicle.round
            nodes = len(current.members) if current is not None else self._office.rules.limits.max_nodes
            self._try_at = now + self._office.draw.random() * _SPREAD_SECONDS * nodes
        if now < self._try_at:
            return False, self._try_at
        return self._campaign(now, incarnation)

    def _remove(self, stray: Entry, now: float) -> float:
        """A leader's key has a lease; what has none was put there by somebody else, and would stand for ever."""
        logger.error("%s has no lease, so no node has written it: it is removed", stray.key)
        self._office.store.write([Compare(key=stray.key, mod_revision=stray.mod_revision)], [Delete(stray.key)])
        return now + _LOOK_SECONDS

    def step_down(self) -> None:
        if self.leading is not None:
            self.leading.close()
            self.leading = None

    def _campaign(self, now: float, incarnation: str) -> tuple[bool, float | None]:
        """Create `leader`, unless somebody has done so, as long as the own key stands."""
        own = self._own.entry
        if own is None:
            return False, None
        node_id = self._own.node.node_id
        text = News(node_id=node_id, incarnation=incarnation).to_json()
        compares = [
            Compare(key=self._office.keys.leader, exists=False),
            Compare(key=own.key, create_revision=own.create_revision),
        ]
        key, chronicle = self._office.keys.leader, self._office.chronicle
        outcome, found = self._office.store.write_and_read(compares, [Put(key, text, own.lease)], [key, own.key])
        if not found.revision:
            self._own.check()
            return False, now
        held = found.get(own.key)
        if held is None or held.lease != own.lease:
            raise LeaseGoneError
        if outcome is not Outcome.APPLIED:
            self._try_at = None
            self._take_leader(found.get(key), found.revision)
            return False, now if chronicle.leader_entry is None else None
        chronicle.take_leader(found.get(key), found.revision, now)
        logger.info("node %s leads", node_id)
        self._begin()
        return True, None

    def _begin(self) -> None:
        if self.leading is None:
            self.leading = Leading(self._office, self._own.lease)
