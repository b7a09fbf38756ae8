"""A store in memory with etcd's semantics: revisions, leases on a given clock, transactions, watches, faults.

One `FakeServer` is the store; each node has a `FakeStore`, a client with faults of its own. Nothing happens by itself:
leases end and events arrive when someone calls the server, or `pump()` where delivery is explicit.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tenacity

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.store import Compare, Delete, Entry, Event, Lease, Outcome, Put, Snapshot
from elastic.rendezvous.transact import Answer, NotAppliedError, Transactor

_T = TypeVar("_T")

MIN_TTL_SECONDS = 2
ATTEMPTS = 3  # of each read and write, as the real gateway makes some


class Fault(enum.Enum):
    """What becomes of one operation of a client."""

    UNAVAILABLE = "never arrives"
    LOST = "is done, its answer is lost"
    DELAYED = "gets no answer and is done at `FakeServer.release()`"  # writes only


@dataclasses.dataclass
class _FakeLease:
    ttl_seconds: int
    deadline: float


class FakeServer:
    """The store itself. `at_once`: watches are told in the call that changed something; else by `pump()`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, at_once: bool = False) -> None:
        self.clock = clock
        self.revision = 1
        self.compacted = 0
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, _FakeLease] = {}
        self.held: list[Callable[[], object]] = []
        self._at_once = at_once
        self._history: list[list[Event]] = []  # one list per revision, in order
        self._watches: list[FakeWatch] = []
        self._next_lease = 1
        self._lock = threading.RLock()
        self._delivery = threading.RLock()

    def settle(self) -> None:
        """After anything that may have changed something: leases end, and watches are told where they are at once."""
        with self._lock:
            now = self.clock()
            for lease_id in [i for i, lease in self.leases.items() if lease.deadline <= now]:
                self._end_lease(lease_id)
        if self._at_once:
            self.pump()

    def pump(self) -> int:
        """Tell every watch of a reachable client what it has missed; returns the number of callbacks."""
        with self._delivery:
            return sum(watch.deliver() for watch in list(self._watches))

    def release(self) -> None:
        """Apply the delayed writes, in the order they were sent."""
        held, self.held = self.held, []
        for apply in held:
            apply()
        self.settle()

    def compact(self) -> None:
        """Forget all history: a watch that is behind gets a gap."""
        with self._lock:
            self.compacted = self.revision
            self._history = [events for events in self._history if events[0].revision >= self.compacted]

    def image(self) -> tuple[int, dict[str, Entry], list[list[Event]]]:
        """What a copy of its data would hold, but for leases, which may live on."""
        with self._lock:
            return self.revision, dict(self.entries), list(self._history)

    def put_back(self, image: tuple[int, dict[str, Entry], list[list[Event]]]) -> None:
        """To an earlier state; a watch that is ahead of it gets a gap."""
        with self._lock:
            self.revision, self.entries, self._history = image

    def snapshot(self, keys: Sequence[str], prefix: bool) -> Snapshot:
        with self._lock:
            entries = sorted(self.entries.items())
            found = {k: e for k, e in entries if any(_matches(k, key, prefix) for key in keys)}
            return Snapshot(entries=found, revision=self.revision)

    def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], peek: str | None, keys: Sequence[str]
    ) -> Answer:
        with self._lock:
            if not all(self._holds(compare) for compare in compares):
                peeked = self.entries.get(peek) if peek else None
                found = self.snapshot(keys, prefix=False).entries
                return Answer(succeeded=False, revision=self.revision, peeked=peeked, found=found)
            if any(isinstance(op, Put) and op.lease and op.lease not in self.leases for op in operations):
                return Answer(succeeded=False, revision=0, lease_missing=True)
            self._apply(operations)
            return Answer(succeeded=True, revision=self.revision, found=self.snapshot(keys, prefix=False).entries)

    def grant(self, ttl_seconds: int) -> Lease:
        with self._lock:
            granted = max(MIN_TTL_SECONDS, ttl_seconds)
            lease_id, self._next_lease = self._next_lease, self._next_lease + 1
            self.leases[lease_id] = _FakeLease(granted, self.clock() + granted)
            return Lease(id=lease_id, ttl_seconds=granted, sent=self.clock(), revision=self.revision)

    def renew(self, lease_id: int) -> int:
        with self._lock:
            lease = self.leases.get(lease_id)
            if lease is None:
                return 0
            lease.deadline = self.clock() + lease.ttl_seconds
            return lease.ttl_seconds

    def revoke(self, lease_id: int) -> None:
        with self._lock:
            if lease_id in self.leases:
                self._end_lease(lease_id)

    def events_after(self, revision: int) -> list[Event]:
        with self._lock:
            return [event for events in self._history if events[0].revision > revision for event in events]

    def add(self, watch: FakeWatch) -> None:
        self._watches.append(watch)

    def remove(self, watch: FakeWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def _end_lease(self, lease_id: int) -> None:
        del self.leases[lease_id]
        self._apply([Delete(key) for key, entry in self.entries.items() if entry.lease == lease_id])

    def _holds(self, compare: Compare) -> bool:
        entry = self.entries.get(compare.key)
        if compare.exists is not None:
            return compare.exists == (entry is not None)
        if compare.mod_revision is not None:
            return compare.mod_revision == (entry.mod_revision if entry else 0)
        return compare.create_revision == (entry.create_revision if entry else 0)

    def _apply(self, operations: Sequence[Put | Delete]) -> None:
        revision = self.revision + 1
        events = []
        for op in operations:
            old = self.entries.get(op.key)
            if isinstance(op, Put):
                created = old.create_revision if old else revision
                new = Entry(key=op.key, value=op.value, create_revision=created, mod_revision=revision, lease=op.lease)
                self.entries[op.key] = new
                events.append(Event(key=op.key, revision=revision, entry=new))
            elif old is not None:
                del self.entries[op.key]
                events.append(Event(key=op.key, revision=revision, entry=None))
        if events:
            self.revision = revision
            self._history.append(events)


class FakeWatch:
    """A watch of one client."""

    def __init__(
        self,
        store: FakeStore,
        keys: Sequence[str],
        prefix: bool,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._prefix = prefix
        self._after = after_revision
        self._on_events = on_events
        self._on_gap = on_gap
        self._delivering = False
        self.closed = False

    def deliver(self) -> int:
        """Called by the server's pump, under its delivery lock."""
        calls = 0
        if self._delivering:  # a callback that wrote: the loop below sees what it did
            return calls
        self._delivering = True
        try:
            while not self.closed and self._store.available:
                server = self._store.server
                if self._after + 1 < server.compacted or self._after > server.revision:
                    self._after = min(server.revision, server.compacted or server.revision)
                    self._store.count_gap()
                    self._on_gap()
                    calls += 1
                    continue
                events = self._store.server.events_after(self._after)
                if not events:
                    break
                self._after = events[-1].revision
                for key in self._keys:
                    if wanted := [event for event in events if _matches(event.key, key, self._prefix)]:
                        self._on_events(wanted)
                        calls += 1
        finally:
            self._delivering = False
        return calls

    def close(self) -> None:
        self.closed = True
        self._store.server.remove(self)


class FakeStore:
    """A client of a FakeServer; a `Store`.

    `available = False` cuts it off, watches included. `fail(...)` sets the fate of the next attempts (a read or write
    makes up to ATTEMPTS of them); `faults`, where given, is asked for the fate of every other one.
    """

    def __init__(self, server: FakeServer, *, faults: Callable[[str], Fault | None] | None = None) -> None:
        self.server = server
        self.available = True
        self.faults = faults
        self._planned: dict[str, collections.deque[Fault | None]] = collections.defaultdict(collections.deque)
        self._counts: collections.Counter[str] = collections.Counter(
            dict.fromkeys(
                ("operations", "retries", "errors", "bytes_sent", "bytes_received", "unknown_writes", "gaps"), 0
            )
        )
        self._watches: list[FakeWatch] = []
        self._retrying = self._policy()
        self._transactor = Transactor(self._commit, self._retrying)

    def fail(self, operation: str, *fates: Fault | None) -> None:
        """What becomes of the next attempts of `operation`: read, write, grant, renew or revoke."""
        self._planned[operation].extend(fates)

    def read(self, key: str, *more: str, prefix: bool = False) -> Snapshot:
        keys = (key, *more)
        found: Snapshot = self._retrying(self._attempt, "read", lambda: self.server.snapshot(keys, prefix))
        return found

    def write(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        nonce_key: str | None = None,
        nonce_lease: int = 0,
    ) -> tuple[Outcome, int]:
        outcome, revision = self._transactor.write(compares, operations, nonce_key=nonce_key, nonce_lease=nonce_lease)
        self._counts["unknown_writes"] += outcome is Outcome.UNKNOWN
        return outcome, revision

    def write_and_read(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], keys: Sequence[str]
    ) -> tuple[Outcome, Snapshot]:
        outcome, found = self._transactor.write_and_read(compares, operations, keys)
        self._counts["unknown_writes"] += outcome is Outcome.UNKNOWN
        return outcome, found

    def grant(self, ttl_seconds: int) -> Lease:
        lease: Lease = self._retrying(self._attempt, "grant", lambda: self.server.grant(ttl_seconds))
        return lease

    def renew(self, lease_id: int, *, timeout_seconds: float | None = None) -> int:
        return self._attempt("renew", lambda: self.server.renew(lease_id))

    def revoke(self, lease_id: int) -> None:
        self._retrying(self._attempt, "revoke", lambda: self.server.revoke(lease_id))

    def watch(
        self,
        keys: Sequence[str],
        *,
        prefix: bool = False,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> FakeWatch:
        watch = FakeWatch(self, keys, prefix, after_revision, on_events, on_gap)
        self._watches.append(watch)
        self.server.add(watch)
        self.server.settle()
        return watch

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def count_gap(self) -> None:
        self._counts["gaps"] += 1

    def close(self) -> None:
        self.available = False
        for watch in self._watches:
            watch.close()

    def _commit(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        peek: str | None,
        keys: Sequence[str] = (),
    ) -> Answer:
        return self._attempt("write", lambda: self.server.commit(compares, operations, peek, keys))

    def _attempt(self, operation: str, act: Callable[[], _T]) -> _T:
        self._counts["operations"] += 1
        self.server.settle()
        fate = self._fate(operation)
        if fate is None or fate is Fault.LOST:
            result = act()
            self.server.settle()
            if fate is None:
                return result
        elif fate is Fault.DELAYED:
            self.server.held.append(act)
        self._counts["errors"] += 1
        error = NotAppliedError if fate is Fault.UNAVAILABLE else StoreUnavailableError
        raise error(f"the {operation} {fate.value}")

    def _fate(self, operation: str) -> Fault | None:
        if not self.available:
            return Fault.UNAVAILABLE
        if self._planned[operation]:
            return self._planned[operation].popleft()
        return self.faults(operation) if self.faults else None

    def _policy(self) -> tenacity.Retrying:
        def count(_: tenacity.RetryCallState) -> None:
            self._counts["retries"] += 1

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailableError),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            sleep=lambda _: None,
            before_sleep=count,
            reraise=True,
        )


def _matches(key: str, wanted: str, prefix: bool) -> bool:
    return key.startswith(wanted) if prefix else key == wanted
