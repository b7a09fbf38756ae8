"""This node's lease and the key under it: having them, keeping the key as it should be, letting go."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.claim import Claimant
from elastic.rendezvous.identity import Identity
from elastic.rendezvous.records import Keys, NodeRecord
from elastic.rendezvous.round import Node
from elastic.rendezvous.store import Compare, Entry, Lease, Outcome, Put, Snapshot, Store

logger = logging.getLogger(__name__)


class LeaseGoneError(Exception):
    """The lease has ended, and all keys under it with it."""


class Keeper(Protocol):
    """Renews one lease; see `lease.LeaseKeeper`."""

    @property
    def answered(self) -> float: ...

    def fence(self) -> float: ...

    def in_doubt(self) -> bool: ...

    def close(self) -> None: ...


MakeKeeper = Callable[[Lease, Callable[[], None]], Keeper]  # of a lease, and what to call when it is lost


class Holding:
    """The node as it should be in the store (`node`), and as it is (`entry`, None: it is not there)."""

    def __init__(
        self,
        *,
        store: Store,
        keys: Keys,
        node: Node,
        identity: Identity,
        version: str,
        ttl: int,
        make_keeper: MakeKeeper,
        on_lost: Callable[[int], None],
    ) -> None:
        """`on_lost` is called with the lease's id, from the keeper's thread."""
        self._store = store
        self._keys = keys
        self._identity = identity
        self._version = version
        self._claimant = Claimant(store, keys, node.node_id, identity, ttl)
        self._ttl = ttl
        self._make_keeper = make_keeper
        self._on_lost = on_lost
        self.keeper: Keeper | None = None  # of the newest lease; its fence stands also when that is lost
        self.node = dataclasses.replace(node, join=0)  # 0: no seat is this node's
        self.entry: Entry | None = None
        self.lease = 0  # that the key is under
        self._recorded: tuple[Node | None, str] = (None, "")  # and its record

    @property
    def wanted_key(self) -> str:
        """That `hold` looks at before it is this node's."""
        return self._claimant.key

    def hold(self, now: float, seen: Snapshot | None = None) -> float | None:
        """Have a lease, and under it a key that says what this node is. Returns when to look again.

        `seen`: a read of `wanted_key` that was made just now, and need not be made again.
        Raises: LeaseGoneError; StoreUnavailableError, also where a write's fate is not known.
        """
        if not self.lease:
            self._take_lease()
        if self.entry is None:
            return self._claim(now, seen)
        if self.node.join == 0:
            self.node = dataclasses.replace(self.node, join=self.entry.mod_revision)
        self.write()
        return None

    def enter(self, keys: Sequence[str]) -> Snapshot | None:
        """A lease, the key if nobody has it, and `keys` read with it, without a look before. Returns what was found.

        None: its fate is not known. Then, and when somebody else has the key, `hold` goes on. Raises: as `hold`.
        """
        lease, key = self._take_lease(), self.wanted_key
        # The store was at this revision when the lease was granted, and every later one is higher: see `claim.Claimed`.
        before = self.node
        self.node = dataclasses.replace(before, node_id=self._claimant.node_id, join=lease.revision)
        put = Put(key, self._record(), lease.id)
        outcome, found = self._store.write_and_read([Compare(key=key, exists=False)], [put], [*keys, key])
        if outcome is Outcome.APPLIED:
            self._begin(found.entries[key], self.node.node_id, lease.revision)
        else:
            self.node = before
        return found if found.revision else None

    def write(self) -> None:
        """Make the key say what `node` is, if it does not. Raises as `hold`."""
        entry, text = self.entry, self._record()
        if entry is None or text == entry.value:
            return
        unchanged = Compare(key=entry.key, mod_revision=entry.mod_revision)
        outcome, revision = self._store.write([unchanged], [Put(entry.key, text, self.lease)])
        if outcome is Outcome.APPLIED:
            self.entry = dataclasses.replace(entry, value=text, mod_revision=revision)
            return
        found = self._store.read(entry.key).get(entry.key)
        if found is None or found.lease != self.lease:
            raise LeaseGoneError
        self.entry = found
        raise StoreUnavailableError(f"the write of {entry.key} was {outcome.value}")

    def look_again(self) -> None:
        """The store may hold another version of the key than this node has written last."""
        self.entry = None

    def check(self) -> None:
        """A write under the lease was not applied: was it because of the lease? Raises: LeaseGoneError."""
        if self._store.renew(self.lease) == 0:
            raise LeaseGoneError

    def forget(self) -> None:
        """The lease is gone; the next `hold` begins anew."""
        self.lease, self.entry = 0, None
        self.node = dataclasses.replace(self.node, join=0)
        self.stop_renewing()

    def stop_renewing(self) -> None:
        if self.keeper is not None:
            self.keeper.close()

    def give_up(self) -> None:
        """End the lease now: all keys under it go at once. Raises: StoreUnavailableError."""
        self.stop_renewing()
        if self.lease:
            self._store.revoke(self.lease)
        self.forget()

    def _take_lease(self) -> Lease:
        lease = self._store.grant(self._ttl)
        self.keeper = self._make_keeper(lease, lambda: self._on_lost(lease.id))  # or the lease ends by itself
        self.lease = lease.id
        return lease

    def _claim(self, now: float, seen: Snapshot | None) -> float | None:
        """Create the key; a live duplicate keeps the id, and this node takes the next one."""
        claimed = self._claimant.claim(now, self.lease, seen)
        if claimed.again_at is not None:
            return claimed.again_at
        if claimed.entry is not None:  # a write of ours that had no answer
            written = NodeRecord.from_json(claimed.entry.value).node
            self._begin(claimed.entry, written.node_id, written.join)
            return now
        self.node = dataclasses.replace(self.node, node_id=claimed.node_id, join=claimed.revision)
        key, text = self._keys.node(claimed.node_id), self._record()
        outcome, revision = self._store.write([Compare(key=key, exists=False)], [Put(key, text, self.lease)])
        if outcome is not Outcome.APPLIED:
            self.check()
            return now
        entry = Entry(key=key, value=text, create_revision=revision, mod_revision=revision, lease=self.lease)
        self._begin(entry, claimed.node_id, claimed.revision)
        return None

    def _begin(self, entry: Entry, node_id: str, join: int) -> None:
        self.entry = entry
        self.node = dataclasses.replace(self.node, node_id=node_id, join=join)
        logger.info("node %s has joined (join %d)", node_id, join)

    def _record(self) -> str:
        """Asked for at each pass, so it is made anew for another node only."""
        node, text = self._recorded
        if node != self.node:
            text = NodeRecord(node=self.node, identity=self._identity, version=self._version).to_json()
            self._recorded = self.node, text
        return text
