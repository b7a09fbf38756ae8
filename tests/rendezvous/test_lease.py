"""The keeper of a lease, on a clock of the test's and then on its own thread."""

from __future__ import annotations

import threading
import time

import pytest

from elastic.rendezvous.lease import DOUBT_SHARE, FENCE_SHARE, LeaseKeeper
from elastic.rendezvous.store import Put
from tests.support.etcd import eventually
from tests.support.fake_store import FakeServer, FakeStore, Fault

TTL = 6


class Scene:
    """A keeper whose thread is the test, and what it said."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.server = FakeServer(lambda: self.now)
        self.store = FakeStore(self.server)
        self.said: list[str] = []
        self.lease = self.store.grant(TTL)
        self.keeper = LeaseKeeper(
            self.store,
            self.lease,
            on_lost=lambda: self.said.append("lost"),
            on_doubt=lambda: self.said.append("doubt"),
            on_renewed=lambda seconds: self.said.append("renewed"),
            clock=lambda: self.now,
        )

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (wait := self.keeper.step()) is not None and self.now + wait <= end:
            self.now += max(wait, 0.001)
        self.now = end


def test_a_lease_is_renewed_six_times_in_a_ttl_and_lives() -> None:
    scene = Scene()
    scene.run(10 * TTL)
    assert 59 <= scene.said.count("renewed") <= 60
    assert set(scene.said) == {"renewed"}
    assert scene.store.renew(scene.lease.id) == TTL


def test_the_fence_follows_the_sending_of_the_last_answered_renewal() -> None:
    scene = Scene()
    assert scene.keeper.fence() == 1000 + FENCE_SHARE * TTL
    scene.run(1.5)
    assert scene.keeper.fence() == pytest.approx(1001 + FENCE_SHARE * TTL)
    scene.store.available = False
    scene.run(3 * TTL)
    assert scene.keeper.fence() == pytest.approx(1001 + FENCE_SHARE * TTL)
    assert scene.keeper.answered == pytest.approx(1001)


def test_a_renewal_that_was_done_and_not_answered_does_not_move_the_fence() -> None:
    scene = Scene()
    scene.store.fail("renew", *[Fault.LOST] * 3)
    scene.run(1.6)
    assert scene.keeper.fence() == 1000 + FENCE_SHARE * TTL
    scene.run(1)
    assert scene.keeper.fence() > 1001.5 + FENCE_SHARE * TTL


def test_the_granted_ttl_counts_not_the_one_asked_for() -> None:
    server = FakeServer(lambda: 0.0)
    store = FakeStore(server)
    keeper = LeaseKeeper(store, store.grant(1), on_lost=lambda: None, clock=lambda: 0.0)
    assert keeper.fence() == FENCE_SHARE * 2


def test_a_lease_in_doubt_is_said_once_and_taken_back_by_an_answer() -> None:
    scene = Scene()
    scene.run(1)
    scene.store.available = False
    scene.run(DOUBT_SHARE * TTL - 0.1)
    assert not scene.keeper.in_doubt()
    assert "doubt" not in scene.said
    scene.run(0.2)
    assert scene.keeper.in_doubt()
    scene.run(1)
    assert scene.said.count("doubt") == 1
    scene.store.available = True
    scene.run(1)
    assert not scene.keeper.in_doubt()
    scene.store.available = False
    scene.run(TTL)
    assert scene.said.count("doubt") == 2


def test_a_lease_that_ended_while_the_store_was_away_is_said_to_be_lost_once() -> None:
    scene = Scene()
    scene.store.write([], [Put("/n", "", scene.lease.id)])
    scene.store.available = False
    scene.run(2 * TTL)
    assert "lost" not in scene.said  # nobody has said so; the fence tells what may be believed
    scene.store.available = True
    scene.run(TTL)
    assert scene.said[-2:] == ["doubt", "lost"]
    assert scene.keeper.step() is None
    assert scene.keeper.fence() < scene.now


def test_after_a_failure_it_tries_again_sooner_but_does_not_spin() -> None:
    scene = Scene()
    scene.store.available = False
    scene.run(TTL)
    assert 6 <= scene.store.counters()["errors"] <= 12


def test_a_machine_that_slept_through_its_lease_finds_it_lost_at_the_first_step() -> None:
    scene = Scene()
    scene.run(2)
    scene.now += 300
    scene.server.settle()
    assert scene.keeper.fence() < scene.now
    assert scene.keeper.step() is None
    assert scene.said[-1] == "lost"


def test_its_thread_renews_and_is_gone_after_close() -> None:
    server = FakeServer(at_once=True)
    store = FakeStore(server)
    before = set(threading.enumerate())
    renewed, lost = threading.Event(), threading.Event()
    lease = store.grant(2)
    clock = time.monotonic
    keeper = LeaseKeeper(store, lease, on_lost=lost.set, on_renewed=lambda _: renewed.set(), clock=clock)
    keeper.start()
    assert renewed.wait(5)
    assert keeper.fence() > clock() + 1
    store.revoke(lease.id)
    assert lost.wait(5)
    keeper.close()
    keeper.close()
    eventually(lambda: not set(threading.enumerate()) - before)
