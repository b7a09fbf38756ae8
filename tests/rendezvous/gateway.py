"""What the tests of the gateway to etcd share: a key, a watch of it, reading and writing it."""

from __future__ import annotations

from elastic.rendezvous.etcd_store import EtcdStore
from elastic.rendezvous.store import Event, Outcome, Put

KEY = "/elasticd/job/round"
NONCE = "/elasticd/job/nonces/a"


class Listener:
    """A watch of KEY with what it told: values, and `gap`."""

    def __init__(self, store: EtcdStore, after_revision: int) -> None:
        self.told: list[str | None] = []
        store.watch([KEY], after_revision=after_revision, on_events=self._on_events, on_gap=self._on_gap)

    def _on_events(self, events: list[Event]) -> None:
        self.told += [event.entry.value if event.entry else None for event in events]

    def _on_gap(self) -> None:
        self.told.append("gap")


def put(store: EtcdStore, value: str) -> int:
    outcome, revision = store.write([], [Put(KEY, value)], nonce_key="/elasticd/job/nonces/other")
    assert outcome is Outcome.APPLIED
    return revision


def value(store: EtcdStore) -> str | None:
    entry = store.read(KEY).get(KEY)
    return entry.value if entry else None
