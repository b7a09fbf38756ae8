"""A node that is cut off from the store for a while or for good, as only the store in memory can do it."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterator

import pytest

from elastic.errors import StoreGoneError
from elastic.rendezvous.round import Phase
from tests.rendezvous.peers import DEAD_PID, RULES, TTL, Job, all_run
from tests.support.fake_store import FakeServer, FakeStore


@pytest.fixture
def cut() -> Iterator[tuple[Job, list[FakeStore]]]:
    server = FakeServer(at_once=True)
    stores: list[FakeStore] = []

    def connect() -> FakeStore:
        stores.append(FakeStore(server))
        return stores[-1]

    made = Job(connect, "job")
    yield made, stores
    made.close()


def test_a_node_that_is_cut_off_is_told_to_drain_then_expelled_and_comes_back_anew(
    cut: tuple[Job, list[FakeStore]],
) -> None:
    job, stores = cut
    a, b = job.start("a"), job.start("b")
    job.until(all_run([a, b]))
    join, number = next(node.join for node in b.view.nodes if node.node_id == "b"), a.running
    stores[1].available = False
    job.until(lambda: b.view.drain_wanted)
    assert b.member.fence(time.monotonic()) < time.monotonic() + TTL / 2
    job.until(all_run([a], 1))
    assert b.running == number  # nobody could tell it; its warden is what ends its workers
    stores[1].available = True
    job.until(all_run([a, b]))
    assert b.running > number + 1
    assert b.round is not None
    assert next(member.join for member in b.round.members if member.node_id == "b") > join


def test_a_store_that_is_put_back_to_an_older_state_stops_nothing_for_good(
    cut: tuple[Job, list[FakeStore]], caplog: pytest.LogCaptureFixture
) -> None:
    job, stores = cut
    a, b = job.start("a"), job.start("b")
    job.until(all_run([a, b]))
    image = stores[0].server.image()
    for number in (2, 3):
        b.fail(charged=False)
        job.until(lambda number=number: a.running == b.running == number)  # type: ignore[misc]
    stores[0].server.put_back(image)
    job.until(lambda: "put back to an older state" in caplog.text)
    b.fail(charged=False)
    job.until(lambda: a.running == b.running > 3)


def test_a_short_outage_costs_nothing(cut: tuple[Job, list[FakeStore]]) -> None:
    job, stores = cut
    a, b = job.start("a"), job.start("b")
    job.until(all_run([a, b]))
    number = a.running
    for store in stores:
        store.available = False
    job.until(lambda: a.view.drain_wanted and b.view.drain_wanted)
    for store in stores:
        store.available = True
    job.until(lambda: not a.view.drain_wanted and not b.view.drain_wanted)
    assert (a.running, b.running, a.round and a.round.phase) == (number, number, Phase.RUNNING)


def test_a_store_away_for_longer_than_the_join_timeout_is_an_error(cut: tuple[Job, list[FakeStore]]) -> None:
    job, stores = cut
    a = job.start("a", join_timeout=1.5)
    job.until(all_run([a]))
    stores[0].available = False
    job.until(lambda: isinstance(a.view.error, StoreGoneError))
    assert re.search(r"has not answered for \d+ s \(--join-timeout 1.5(: .+)?\): check its servers", str(a.view.error))


def test_an_outage_is_told_once_with_its_remedy_and_nobody_who_leaves_waits_for_its_end(
    cut: tuple[Job, list[FakeStore]], caplog: pytest.LogCaptureFixture
) -> None:
    job, stores = cut
    caplog.set_level(logging.INFO, logger="elastic")
    a = job.start("a", join_timeout=50.0, ttl_seconds=6)
    job.until(all_run([a]))
    stores[0].available = False
    job.until(lambda: "etcd has not answered for" in caplog.text)
    time.sleep(1.0)  # several attempts more
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING and "etcd" in record.msg]
    assert "--join-timeout (50 s) is over; check its servers, --rdzv-endpoint" in warning.getMessage()
    stores[0].available = True
    job.until(lambda: "etcd answers again" in caplog.text)
    stores[0].available = False
    job.until(lambda: caplog.text.count("etcd has not answered for") == 2)
    began = time.monotonic()
    a.member.close()
    assert time.monotonic() - began < 4.5, "it waits a moment, not for as long as the lease"


def test_a_node_that_joins_and_is_lost_again_and_again_has_to_wait(cut: tuple[Job, list[FakeStore]]) -> None:
    job, _ = cut
    rules = dataclasses.replace(RULES, probation_window_seconds=60.0, probation_seconds=1.0)
    a = job.start("a", rules=rules)
    job.until(all_run([a]))
    pauses = []
    for _ in range(3):
        b = job.start("b", rules=rules, pid=DEAD_PID)
        pauses.append(job.until(all_run([a, b])))
        b.vanish()
    assert pauses[0] < 1.0 < pauses[1] < 2.0 < pauses[2]
