"""A store as the contract's tests see it, with its surroundings, and what a watch of it tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic.rendezvous.store import Event, Outcome, Put, Store
from tests.support.etcd import eventually


@dataclasses.dataclass
class Place:
    """A store and its surroundings: more clients, time, compaction."""

    store: Store
    other: Store  # another node's client
    root: str  # keys of this test alone
    pass_time: Callable[[], None]
    compact: Callable[[], object]

    def key(self, name: str) -> str:
        return self.root + name

    def wait(self, condition: Callable[[], object]) -> None:
        eventually(condition, pause=self.pass_time)

    def value(self, name: str) -> str | None:
        entry = self.store.read(self.key(name)).get(self.key(name))
        return entry.value if entry else None

    def put(self, name: str, value: str) -> int:
        outcome, revision = self.other.write([], [Put(self.key(name), value)])
        assert outcome is Outcome.APPLIED
        return revision


class Heard:
    """What a watch told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.batches: list[int] = []
        self.gaps = 0

    def on_events(self, events: list[Event]) -> None:
        self.events += events
        self.batches.append(len(events))

    def on_gap(self) -> None:
        self.gaps += 1

    def told(self) -> list[tuple[str, str | None]]:
        return [(e.key.rpartition("/")[2], e.entry.value if e.entry else None) for e in self.events]
