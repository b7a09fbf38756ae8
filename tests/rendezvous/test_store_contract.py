"""What the rendezvous relies on in a store: the same tests for etcd through the gateway and for the one in memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.store import MAX_OPERATIONS, Compare, Delete, Event, Outcome, Put, Store, Watch
from tests.rendezvous.places import Heard, Place
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.fake_store import FakeServer, FakeStore

_roots = (f"/elasticd/contract-{n}/" for n in itertools.count())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    root = next(_roots)
    if request.param == "etcd":
        cluster: EtcdCluster = request.getfixturevalue("cluster")
        store, other = open_store(cluster.config()), open_store(cluster.config())
        yield Place(store, other, root, lambda: time.sleep(0.01), cluster.compact)
        store.close()
        other.close()
        return
    now = [100.0]
    server = FakeServer(lambda: now[0], at_once=True)

    def pass_time() -> None:
        now[0] += 0.1
        server.settle()

    yield Place(FakeStore(server), FakeStore(server), root, pass_time, server.compact)


def test_a_read_of_nothing_still_has_a_revision(place: Place) -> None:
    revision = place.put("a", "1")
    snapshot = place.store.read(place.key("none"), prefix=True)
    assert snapshot.entries == {}
    assert snapshot.revision >= revision


def test_a_read_sees_one_key_or_all_under_a_prefix(place: Place) -> None:
    for name in ("n/1", "n/2", "n", "m"):
        place.put(name, f"value of {name} — ü")
    assert set(place.store.read(place.key("n/"), prefix=True).entries) == {place.key("n/1"), place.key("n/2")}
    assert set(place.store.read(place.key("n")).entries) == {place.key("n")}
    assert place.value("n/1") == "value of n/1 — ü"


def test_a_read_sees_several_keys_at_one_moment(place: Place) -> None:
    before = place.put("a", "1")
    place.put("c", "3")
    snapshot = place.store.read(place.key("a"), place.key("b"), place.key("c"))
    assert {key: entry.value for key, entry in snapshot.entries.items()} == {place.key("a"): "1", place.key("c"): "3"}
    assert snapshot.entries[place.key("a")].mod_revision == before
    assert snapshot.revision == place.store.read(place.key("b")).revision
    snapshot = place.store.read(place.key("none/"), place.key("a"), prefix=True)
    assert set(snapshot.entries) == {place.key("a")}


def test_a_write_of_several_keys_has_one_revision(place: Place) -> None:
    outcome, revision = place.store.write([], [Put(place.key("a"), "1"), Put(place.key("b"), "2")])
    assert outcome is Outcome.APPLIED
    entries = place.store.read(place.root, prefix=True).entries.values()
    assert [(e.create_revision, e.mod_revision) for e in entries] == [(revision, revision)] * 2


def test_a_second_write_moves_only_the_mod_revision(place: Place) -> None:
    first, second = place.put("a", "1"), place.put("a", "2")
    entry = place.store.read(place.key("a")).entries[place.key("a")]
    assert (entry.create_revision, entry.mod_revision) == (first, second)
    assert second > first


def test_a_key_that_comes_again_is_created_again(place: Place) -> None:
    place.put("a", "1")
    place.store.write([], [Delete(place.key("a"))])
    again = place.put("a", "1")
    assert place.store.read(place.key("a")).entries[place.key("a")].create_revision == again


@pytest.mark.parametrize("nonce", [False, True])
@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (lambda key, create, mod: Compare(key=key, mod_revision=mod), True),
        (lambda key, create, mod: Compare(key=key, mod_revision=create), False),
        (lambda key, create, mod: Compare(key=key, create_revision=create), True),
        (lambda key, create, mod: Compare(key=key, create_revision=mod), False),
        (lambda key, create, mod: Compare(key=key, exists=True), True),
        (lambda key, create, mod: Compare(key=key, exists=False), False),
        (lambda key, create, mod: Compare(key=key + "none", exists=True), False),
        (lambda key, create, mod: Compare(key=key + "none", exists=False), True),
        (lambda key, create, mod: Compare(key=key + "none", mod_revision=0), True),
        (lambda key, create, mod: Compare(key=key + "none", create_revision=mod), False),
    ],
)
def test_a_write_is_applied_when_all_comparisons_hold(
    place: Place, compare: Callable[[str, int, int], Compare], holds: bool, nonce: bool
) -> None:
    create, mod = place.put("a", "1"), place.put("a", "2")
    always = Compare(key=place.key("a"), exists=True)
    outcome, revision = place.store.write(
        [always, compare(place.key("a"), create, mod)],
        [Put(place.key("b"), "new"), Delete(place.key("a"))],
        nonce_key=place.key("nonce") if nonce else None,
    )
    assert outcome is (Outcome.APPLIED if holds else Outcome.REFUSED)
    assert (place.value("a"), place.value("b")) == ((None, "new") if holds else ("2", None))
    assert revision >= mod


def test_a_comparison_needs_exactly_one_condition() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Compare(key="a")
    with pytest.raises(ValueError, match="exactly one"):
        Compare(key="a", exists=True, mod_revision=3)


def test_a_write_that_etcd_would_not_take_is_an_error_of_the_caller(place: Place) -> None:
    with pytest.raises(ValueError, match="two operations on one key"):
        place.store.write([], [Put("a", "1"), Delete("a")])
    with pytest.raises(ValueError, match="at most"):
        place.store.write([], [Put(f"{n}", "") for n in range(MAX_OPERATIONS + 1)])
    many = [Put(place.key(f"{n}"), "") for n in range(MAX_OPERATIONS)]
    assert place.store.write([], many, nonce_key=place.key("nonce"))[0] is Outcome.APPLIED


def test_writes_with_a_nonce_follow_one_another(place: Place) -> None:
    for n in range(3):
        outcome, revision = place.store.write([], [Put(place.key("a"), str(n))], nonce_key=place.key("nonce"))
        assert outcome is Outcome.APPLIED
        assert place.store.read(place.key("a")).entries[place.key("a")].mod_revision == revision


def test_a_nonce_key_that_another_hand_has_written_does_not_refuse_the_write(place: Place) -> None:
    place.store.write([], [Put(place.key("a"), "1")], nonce_key=place.key("nonce"))
    place.put("nonce", "of an earlier life of this node")
    assert place.store.write([], [Put(place.key("a"), "2")], nonce_key=place.key("nonce"))[0] is Outcome.APPLIED
    place.other.write([], [Delete(place.key("nonce"))])
    assert place.store.write([], [Put(place.key("a"), "3")], nonce_key=place.key("nonce"))[0] is Outcome.APPLIED
    assert place.value("a") == "3"


def test_deleting_what_is_not_there_is_applied_and_changes_nothing(place: Place) -> None:
    before = place.put("a", "1")
    assert place.store.write([], [Delete(place.key("none"))])[0] is Outcome.APPLIED
    assert place.store.read(place.key("a")).revision == before


def test_keys_go_when_their_lease_ends(place: Place) -> None:
    lease = place.store.grant(2)
    assert lease.ttl_seconds >= 2
    place.store.write([], [Put(place.key("a"), "1", lease.id), Put(place.key("b"), "1")])
    assert place.store.read(place.key("a")).entries[place.key("a")].lease == lease.id
    place.wait(lambda: place.value("a") is None)
    assert place.value("b") == "1"
    assert place.store.renew(lease.id) == 0


def test_a_renewed_lease_lives_on(place: Place) -> None:
    lease = place.store.grant(2)
    short = place.store.grant(2)
    place.store.write([], [Put(place.key("a"), "1", lease.id), Put(place.key("b"), "1", short.id)])

    def short_is_gone() -> bool:
        assert place.store.renew(lease.id) == lease.ttl_seconds
        return place.value("b") is None

    place.wait(short_is_gone)
    assert place.value("a") == "1"


def test_a_revoked_lease_takes_its_keys_at_once(place: Place) -> None:
    lease = place.store.grant(60)
    place.store.write([], [Put(place.key("a"), "1", lease.id)])
    place.other.revoke(lease.id)
    assert place.value("a") is None
    assert place.store.renew(lease.id) == 0
    place.store.revoke(lease.id)


def test_what_is_read_with_a_write_is_as_it_is_after_it_whether_it_was_applied_or_not(place: Place) -> None:
    a, b, none = place.key("a"), place.key("b"), place.key("none")
    place.put("b", "2")
    lease = place.store.grant(60)
    outcome, found = place.store.write_and_read([Compare(key=a, exists=False)], [Put(a, "1", lease.id)], [a, b, none])
    assert outcome is Outcome.APPLIED
    assert {key: entry.value for key, entry in found.entries.items()} == {a: "1", b: "2"}
    assert (found.entries[a].mod_revision, found.entries[a].lease) == (found.revision, lease.id)
    assert lease.revision == found.revision - 1
    outcome, again = place.store.write_and_read([Compare(key=a, exists=False)], [Put(a, "3")], [none, a])
    assert (outcome, again.entries, again.revision) == (Outcome.REFUSED, {a: found.entries[a]}, found.revision)
    place.store.revoke(lease.id)
    outcome, gone = place.store.write_and_read([], [Put(a, "4", lease.id)], [a, b])
    assert (outcome, dict(gone.entries), gone.revision) == (Outcome.REFUSED, {}, 0)


@pytest.mark.parametrize("nonce", [None, "nonce"])
def test_a_write_under_a_lease_that_is_gone_is_refused(place: Place, nonce: str | None) -> None:
    lease = place.store.grant(60)
    place.store.revoke(lease.id)
    key = place.key(nonce) if nonce else None
    written = place.store.write([], [Put(place.key("a"), "1", lease.id), Put(place.key("b"), "1")], nonce_key=key)
    assert written == (Outcome.REFUSED, 0)
    assert place.value("b") is None


def test_a_watch_tells_everything_after_its_revision_once_and_in_order(place: Place) -> None:
    place.put("n/0", "before")
    after = place.put("n/1", "1")
    place.put("n/2", "1")
    heard = Heard()
    place.store.watch(
        [place.key("n/")], prefix=True, after_revision=after, on_events=heard.on_events, on_gap=heard.on_gap
    )
    place.put("m", "not watched")
    place.put("n/2", "2")
    place.other.write([], [Delete(place.key("n/2"))])
    last = place.put("n/3", "1")
    expected = [("2", "1"), ("2", "2"), ("2", None), ("3", "1")]
    place.wait(lambda: len(heard.events) >= len(expected))
    assert heard.told() == expected
    assert heard.events[-1].revision == last
    assert heard.gaps == 0


def test_a_watch_of_one_key_tells_nothing_of_others(place: Place) -> None:
    heard = Heard()
    after = place.put("a", "1")
    place.store.watch([place.key("a")], after_revision=after, on_events=heard.on_events, on_gap=heard.on_gap)
    place.put("ab", "1")
    place.put("a", "2")
    place.wait(lambda: heard.events)
    assert heard.told() == [("a", "2")]


def test_keys_that_are_watched_together_are_each_told_in_order(place: Place) -> None:
    heard = Heard()
    after = place.put("b", "0")
    keys = [place.key("a"), place.key("b")]
    place.store.watch(keys, after_revision=after, on_events=heard.on_events, on_gap=heard.on_gap)
    place.put("a", "1")
    place.put("c", "1")
    place.other.write([], [Put(place.key("a"), "2"), Put(place.key("b"), "1")])
    place.put("b", "2")
    place.wait(lambda: len(heard.events) >= 4)
    assert [told for told in heard.told() if told[0] == "a"] == [("a", "1"), ("a", "2")]
    assert [told for told in heard.told() if told[0] == "b"] == [("b", "1"), ("b", "2")]
    assert heard.gaps == 0


def test_what_one_write_changed_is_told_in_one_call(place: Place) -> None:
    heard = Heard()
    place.store.watch(
        [place.root], prefix=True, after_revision=place.put("x", ""), on_events=heard.on_events, on_gap=heard.on_gap
    )
    place.other.write([], [Put(place.key("a"), "1"), Put(place.key("b"), "1")])
    place.wait(lambda: heard.events)
    assert heard.batches == [2]


def test_the_end_of_a_lease_is_told_as_deletion(place: Place) -> None:
    heard = Heard()
    lease = place.other.grant(2)
    _, after = place.other.write([], [Put(place.key("a"), "1", lease.id)])
    place.store.watch([place.key("a")], after_revision=after, on_events=heard.on_events, on_gap=heard.on_gap)
    place.wait(lambda: heard.events)
    assert heard.told() == [("a", None)]


def test_a_watch_below_the_compaction_tells_a_gap_and_goes_on(place: Place) -> None:
    heard = Heard()
    after = place.put("a", "1")
    place.put("a", "2")
    place.put("a", "3")
    place.compact()
    place.store.watch([place.key("a")], after_revision=after, on_events=heard.on_events, on_gap=heard.on_gap)
    place.wait(lambda: heard.gaps)
    place.put("a", "4")
    place.wait(lambda: ("a", "4") in heard.told())
    assert heard.gaps == 1
    assert place.store.counters()["gaps"] == 1


def test_a_closed_watch_is_silent_and_may_be_closed_from_its_own_callback(place: Place) -> None:
    heard = Heard()
    after = place.put("a", "1")
    closed = threading.Event()
    own: list[Watch] = []

    def close_myself(events: list[Event]) -> None:
        own[0].close()
        own[0].close()
        closed.set()

    watch = place.store.watch([place.key("a")], after_revision=after, on_events=heard.on_events, on_gap=heard.on_gap)
    own.append(place.store.watch([place.key("a")], after_revision=after, on_events=close_myself, on_gap=heard.on_gap))
    watch.close()
    place.put("a", "2")
    place.wait(closed.is_set)
    place.put("a", "3")
    assert heard.events == []


def test_a_callback_that_writes_is_told_of_its_own_write(place: Place) -> None:
    heard = Heard()
    after = place.put("a", "1")

    def on_events(events: list[Event]) -> None:
        heard.on_events(events)
        if len(heard.events) < 3:
            place.store.write([], [Put(place.key("a"), str(len(heard.events)))])

    place.store.watch([place.key("a")], after_revision=after, on_events=on_events, on_gap=heard.on_gap)
    place.put("a", "0")
    place.wait(lambda: len(heard.events) == 3)
    assert heard.told() == [("a", "0"), ("a", "1"), ("a", "2")]


def test_of_many_writers_that_compare_one_revision_one_wins(place: Place) -> None:
    for number in range(5):
        revision = place.store.read(place.key("round")).get(place.key("round"))
        expected = Compare(key=place.key("round"), mod_revision=revision.mod_revision if revision else 0)
        outcomes: list[Outcome] = []

        def run(store: Store, name: str, expected: Compare = expected, outcomes: list[Outcome] = outcomes) -> None:
            put = Put(place.key("round"), name)
            outcomes.append(store.write([expected], [put], nonce_key=place.key(f"nonces/{name}"))[0])

        threads = [
            threading.Thread(target=run, args=(store, f"{i}-{j}"))
            for i, store in enumerate((place.store, place.other))
            for j in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(o.value for o in outcomes) == ["applied"] + ["refused"] * 5, number


def test_the_counters_count(place: Place) -> None:
    before = place.store.counters()
    assert set(before) == {
        "operations", "retries", "errors", "bytes_sent", "bytes_received", "unknown_writes", "gaps"
    }  # fmt: skip
    place.value("a")
    assert place.store.counters()["operations"] == before["operations"] + 1


def test_closing_twice_is_fine(place: Place) -> None:
    place.store.close()
    place.store.close()
