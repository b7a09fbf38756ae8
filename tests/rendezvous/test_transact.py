"""A write is applied at most once, whatever becomes of its attempts: every fate of every attempt, in every order."""

from __future__ import annotations

import itertools
import random

import pytest

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.store import Compare, Event, Outcome, Put
from tests.support.fake_store import ATTEMPTS, FakeServer, FakeStore, Fault

FATES = (None, *Fault)


def history(server: FakeServer, key: str) -> list[Event]:
    return [event for event in server.events_after(0) if event.key == key]


@pytest.mark.parametrize("fates", list(itertools.product(FATES, repeat=ATTEMPTS)), ids=str)
@pytest.mark.parametrize("holds", [True, False])
def test_what_a_write_says_is_what_has_become_of_it(fates: tuple[Fault | None, ...], holds: bool) -> None:
    server = FakeServer(lambda: 0.0)
    store = FakeStore(server)
    store.write([], [Put("other", "")], nonce_key="nonce")
    store.fail("write", *fates)
    compare = Compare(key="a", exists=not holds)
    outcome, revision = store.write([compare], [Put("a", "1")], nonce_key="nonce")
    server.release()
    written = history(server, "a")
    assert len(written) <= (1 if holds else 0)
    if outcome is Outcome.APPLIED:
        assert [event.revision for event in written] == [revision]
    elif outcome is Outcome.REFUSED:
        assert not holds
        store.write([], [Put("a", "by another")])  # its condition comes true, and still nothing happens
        server.release()
        assert [event.entry.value for event in history(server, "a") if event.entry] == ["by another"]
    else:
        assert fates[-1] is not None


def test_a_refused_write_with_a_delayed_attempt_cannot_come_true_later() -> None:
    server = FakeServer(lambda: 0.0)
    store, other = FakeStore(server), FakeStore(server)
    other.write([], [Put("a", "there")])
    store.fail("write", Fault.DELAYED)
    outcome, _ = store.write([Compare(key="b", exists=True)], [Put("a", "mine")], nonce_key="nonce")
    assert outcome is Outcome.REFUSED
    other.write([], [Put("b", "")])
    server.release()
    assert server.entries["a"].value == "there"


def test_a_write_given_up_is_settled_by_the_next_one_under_its_nonce_key() -> None:
    server = FakeServer(lambda: 0.0)
    store = FakeStore(server)
    store.fail("write", *[Fault.DELAYED] * ATTEMPTS)
    assert store.write([], [Put("a", "1")], nonce_key="nonce") == (Outcome.UNKNOWN, 0)
    assert store.write([], [Put("a", "2")], nonce_key="nonce")[0] is Outcome.APPLIED
    server.release()
    assert [event.entry.value for event in history(server, "a") if event.entry] == ["2"]


def test_a_lease_that_ended_between_a_lost_answer_and_the_next_attempt_leaves_it_unknown() -> None:
    now = [0.0]
    server = FakeServer(lambda: now[0])
    lease = server.grant(2)

    def faults(operation: str) -> Fault | None:
        first, now[0] = now[0] == 0, now[0] + 5
        return Fault.LOST if first else None

    store = FakeStore(server, faults=faults)
    written = store.write([], [Put("a", "1"), Put("b", "1", lease.id)], nonce_key="nonce", nonce_lease=lease.id)
    assert written == (Outcome.UNKNOWN, 0)
    assert server.entries["a"].value == "1"


@pytest.mark.parametrize("seed", range(20))
def test_counting_with_two_writers_over_a_bad_network_neither_loses_nor_doubles(seed: int) -> None:
    draw = random.Random(seed)
    server = FakeServer(lambda: 0.0)

    def faults(operation: str) -> Fault | None:
        if draw.random() < 0.3:
            server.release()
        fate = draw.choice((None, None, *Fault))
        return Fault.UNAVAILABLE if operation == "read" and fate is Fault.DELAYED else fate

    stores = [FakeStore(server, faults=faults) for _ in range(2)]
    sure = unknown = 0
    for _ in range(300):
        number = draw.randrange(2)
        try:
            entry = stores[number].read("count").get("count")
        except StoreUnavailableError:
            continue
        compare = Compare(key="count", mod_revision=entry.mod_revision if entry else 0)
        put = Put("count", str(int(entry.value) + 1 if entry else 1))
        outcome, _ = stores[number].write([compare], [put], nonce_key=f"nonce-{number}")
        sure += outcome is Outcome.APPLIED
        unknown += outcome is Outcome.UNKNOWN
    server.release()
    total = int(server.entries["count"].value)
    assert len(history(server, "count")) == total
    assert sure <= total <= sure + unknown
