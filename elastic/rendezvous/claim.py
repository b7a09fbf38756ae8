"""How a node comes by its id: a live duplicate keeps it, its own ghost gives it up at once."""

from __future__ import annotations

import dataclasses
import logging

from elastic.rendezvous.identity import Claim, Identity, judge
from elastic.rendezvous.records import Keys, NodeRecord
from elastic.rendezvous.store import Entry, Snapshot, Store

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_PATIENCE_TTLS = 1.2  # for a key that may be a ghost's to go with its lease


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """An id whose key was seen not to be there, or when to look again."""

    node_id: str = ""
    revision: int = 0  # the store's at that look: every later one is higher, so it numbers the join
    entry: Entry | None = None  # the key is there already, ours
    again_at: float | None = None


class Claimant:
    """Looks for an id to take: `b`, or `b-2`, `b-3` ... for live duplicates. Keeps the one found for all joins."""

    def __init__(self, store: Store, keys: Keys, wanted: str, me: Identity, ttl_seconds: float) -> None:
        self._store = store
        self._keys = keys
        self._wanted = wanted
        self._me = me
        self._ttl_seconds = ttl_seconds
        self._number = 1
        self._unsure_since: float | None = None

    @property
    def node_id(self) -> str:
        return self._wanted if self._number == 1 else f"{self._wanted}-{self._number}"

    @property
    def key(self) -> str:
        """Of the id that is looked at next."""
        return self._keys.node(self.node_id)

    def claim(self, now: float, lease: int, seen: Snapshot | None = None) -> Claimed:
        """`lease` is the one that the key is to be under; `seen` a read of `key` that was made just now.

        Raises: StoreUnavailableError, StoreRefusedError.
        """
        while True:
            key = self.key
            snapshot, seen = seen or self._store.read(key), None
            entry = snapshot.get(key)
            if entry is None:
                self._unsure_since = None
                return Claimed(node_id=self.node_id, revision=snapshot.revision)
            if entry.lease == lease:
                return Claimed(node_id=self.node_id, entry=entry)
            verdict = self._judge(entry)
            if verdict is Claim.GHOST:
                logger.info("node %s: taking over from an agent that is dead", self.node_id)
                self._store.revoke(entry.lease)
                continue
            if verdict is Claim.UNSURE:
                since = self._unsure_since = now if self._unsure_since is None else self._unsure_since
                if now < since + _PATIENCE_TTLS * self._ttl_seconds:
                    return Claimed(again_at=now + _LOOK_SECONDS)
            self._unsure_since = None
            logger.warning("node %s: another live agent has this id: taking the next one", self.node_id)
            self._number += 1

    def _judge(self, entry: Entry) -> Claim:
        """A key of our own, of a lease that was lost or of a write without an answer, is a ghost's too."""
        try:
            other = NodeRecord.from_json(entry.value).identity
        except ValueError as exc:
            logger.error("%s: %s", entry.key, exc)
            return Claim.ALIVE
        return Claim.GHOST if other.token == self._me.token else judge(other, self._me)
