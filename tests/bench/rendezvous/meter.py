"""A store that counts what goes through it, by the kind of call and by the two keys that every node reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elastic.rendezvous.etcd_config import Counters
from elastic.rendezvous.records import Keys
from elastic.rendezvous.store import Compare, Delete, Entry, Event, Lease, Outcome, Put, Snapshot, Store, Watch


class Metered:
    """See `Store`. Adds to `counters`: reads, writes, grants, renewals, revokes, watches; round_bytes, news_bytes.

    The bytes are those of the values of `round` and `leader` that were read or told: every node needs the whole round,
    which names all members, so these alone may grow with the number of nodes.
    """

    def __init__(self, store: Store, counters: Counters, keys: Keys) -> None:
        self._store = store
        self._counters = counters
        self._shared = {keys.round: "round_bytes", keys.leader: "news_bytes"}

    def read(self, key: str, *more: str, prefix: bool = False) -> Snapshot:
        self._counters.add("reads")
        snapshot = self._store.read(key, *more, prefix=prefix)
        self._weigh(snapshot.entries.values())
        return snapshot

    def write(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], **nonce: Any
    ) -> tuple[Outcome, int]:
        self._counters.add("writes")
        return self._store.write(compares, operations, **nonce)

    def write_and_read(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], keys: Sequence[str]
    ) -> tuple[Outcome, Snapshot]:
        self._counters.add("writes")
        outcome, found = self._store.write_and_read(compares, operations, keys)
        self._weigh(found.entries.values())
        return outcome, found

    def grant(self, ttl_seconds: int) -> Lease:
        self._counters.add("grants")
        return self._store.grant(ttl_seconds)

    def renew(self, lease_id: int, *, timeout_seconds: float | None = None) -> int:
        self._counters.add("renewals")
        return self._store.renew(lease_id, timeout_seconds=timeout_seconds)

    def revoke(self, lease_id: int) -> None:
        self._counters.add("revokes")
        self._store.revoke(lease_id)

    def watch(
        self,
        keys: Sequence[str],
        *,
        prefix: bool = False,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> Watch:
        def told(events: list[Event]) -> None:
            self._weigh(event.entry for event in events if event.entry is not None)
            on_events(events)

        self._counters.add("watches")
        return self._store.watch(keys, prefix=prefix, after_revision=after_revision, on_events=told, on_gap=on_gap)

    def counters(self) -> Mapping[str, int]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._store.close()

    def _weigh(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if name := self._shared.get(entry.key):
                self._counters.add(name, len(entry.value))
