"""The gateway against real servers that fail: killed, frozen, compacted, cut off, or not willing to let us in."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.etcd_endpoints import Endpoints, Link
from elastic.rendezvous.etcd_store import EtcdStore, open_store
from elastic.rendezvous.lease import LeaseKeeper
from elastic.rendezvous.store import Compare, Outcome, Put
from tests.rendezvous.gateway import KEY, NONCE, Listener, put, value
from tests.support.etcd import EtcdCluster, etcd_cluster, eventually, free_ports
from tests.support.proxy import Proxy


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: EtcdCluster) -> Iterator[EtcdCluster]:
    """One member, repaired after each test."""
    yield shared
    shared.members[0].thaw()
    if not shared.members[0].alive:
        shared.restart()


@pytest.fixture
def stores(cluster: EtcdCluster) -> Iterator[tuple[EtcdStore, EtcdStore]]:
    """The one under test, which gives up after 1.5 s, and a patient one beside it."""
    ours, other = open_store(cluster.config(timeout_seconds=1.5)), open_store(cluster.config(timeout_seconds=10))
    yield ours, other
    ours.close()
    other.close()


def test_who_waits_for_another_threads_connection_is_told_what_to() -> None:
    asked, answer = threading.Event(), threading.Event()

    def connect(endpoint: tuple[str, int], deadline: float) -> Link:
        asked.set()
        answer.wait(30)
        raise StoreUnavailableError("gone")

    def call(seconds: float) -> str:
        with pytest.raises(StoreUnavailableError) as caught, endpoints.use(time.monotonic() + seconds):
            pass
        return str(caught.value)

    endpoints = Endpoints([("h1", 2379), ("::1", 2379)], connect)
    thread = threading.Thread(target=call, args=(30,))
    thread.start()
    assert asked.wait(30)
    assert call(0) == "no connection to h1:2379 or [::1]:2379"
    answer.set()
    thread.join()


def test_a_server_that_was_killed_and_restarted_on_its_data_goes_on(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    ours, other = stores
    listener = Listener(ours, put(other, "1"))
    put(other, "2")
    eventually(lambda: listener.told == ["2"])
    cluster.members[0].kill()
    begin = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=str(cluster.members[0].port)):
        ours.read(KEY)
    assert ours.write([], [Put(KEY, "lost")]) == (Outcome.UNKNOWN, 0)
    assert time.monotonic() - begin < 2 * 1.5 + 3.0
    cluster.restart()
    assert value(other) == "2"
    put(other, "3")
    eventually(lambda: listener.told == ["2", "3"])
    assert ours.counters()["retries"] > 0
    assert ours.counters()["unknown_writes"] == 1


def test_a_server_frozen_for_longer_than_the_timeout_and_thawed_applies_each_write_at_most_once(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    ours, other = stores
    listener = Listener(other, put(other, "0"))
    applied, unknown = [], 0
    for number in range(1, 3):
        expected = Compare(key=KEY, mod_revision=ours.read(KEY).entries[KEY].mod_revision)
        cluster.members[0].freeze()
        outcome, _ = ours.write([expected], [Put(KEY, str(number))], nonce_key=NONCE)
        cluster.members[0].thaw()
        assert outcome is Outcome.UNKNOWN
        unknown += 1
        # Decide anew: the write that follows settles what became of the one before.
        assert ours.write([], [Put("/elasticd/job/x", "")], nonce_key=NONCE)[0] is Outcome.APPLIED
        if value(ours) == str(number):
            applied.append(str(number))
    put(other, "end")
    eventually(lambda: listener.told[-1:] == ["end"])
    assert listener.told == [*applied, "end"]
    assert ours.counters()["unknown_writes"] == unknown == 2


def test_a_write_is_answered_although_the_server_was_frozen_in_the_midst_of_it(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    _, other = stores
    ours = open_store(cluster.config(timeout_seconds=3))
    listener = Listener(ours, put(ours, "0"))
    cluster.members[0].freeze()
    thaw = threading.Timer(1.3, cluster.members[0].thaw)  # an attempt takes 1 s
    thaw.start()
    assert ours.write([], [Put(KEY, "1")], nonce_key=NONCE)[0] is Outcome.APPLIED
    assert ours.counters()["retries"]
    thaw.join()
    put(other, "end")
    eventually(lambda: listener.told[-1:] == ["end"])
    assert listener.told == ["1", "end"]
    ours.close()


def test_a_write_whose_answer_was_lost_is_recognised_and_not_repeated(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    _, other = stores
    listener = Listener(other, put(other, "0"))
    with Proxy(cluster.members[0].port) as proxy:
        ours = open_store(cluster.config(endpoints=(("127.0.0.1", proxy.port),), timeout_seconds=3))
        ours.read(KEY)
        proxy.muted = True
        heal = threading.Timer(0.5, setattr, (proxy, "muted", False))
        heal.start()
        outcome, revision = ours.write([], [Put(KEY, "1")], nonce_key=NONCE)
        heal.join()
        ours.close()
    assert outcome is Outcome.APPLIED
    assert other.read(KEY).entries[KEY].mod_revision == revision
    put(other, "end")
    eventually(lambda: listener.told[-1:] == ["end"])
    assert listener.told == ["1", "end"]


def test_a_write_that_was_under_way_is_not_applied_after_its_second_attempt(cluster: EtcdCluster) -> None:
    with Proxy(cluster.members[0].port) as proxy:
        endpoints = (("127.0.0.1", proxy.port), *cluster.endpoints)
        ours = open_store(cluster.config(endpoints=endpoints, timeout_seconds=2.4), first=0)
        assert ours.write([], [Put(KEY, "0")], nonce_key=NONCE)[0] is Outcome.APPLIED
        proxy.holding = True
        results: list[tuple[Outcome, int]] = []
        compare = Compare(key=KEY, exists=True)  # holds at any later time, too
        thread = threading.Thread(
            target=lambda: results.append(ours.write([compare], [Put(KEY, "early")], nonce_key=NONCE))
        )
        thread.start()
        held = eventually(lambda: proxy.held_with(b"early"))  # without the cancellation, which comes 0.8 s later
        thread.join(10)
        assert results[0][0] is Outcome.APPLIED
        assert ours.write([], [Put(KEY, "2")])[0] is Outcome.APPLIED
        before = proxy.answered_bytes
        proxy.release(held)
        eventually(lambda: proxy.answered_bytes > before + 30)  # a transaction's answer
        assert value(ours) == "2"
        ours.close()


def test_a_write_applied_after_its_writer_gave_up_is_found_by_the_next_one(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    _, other = stores
    with Proxy(cluster.members[0].port) as proxy:
        ours = open_store(cluster.config(endpoints=(("127.0.0.1", proxy.port),), timeout_seconds=2.4))
        _, revision = ours.write([], [Put(KEY, "0")], nonce_key=NONCE)
        compare = Compare(key=KEY, mod_revision=revision)
        proxy.holding = True
        results: list[tuple[Outcome, int]] = []
        thread = threading.Thread(
            target=lambda: results.append(ours.write([compare], [Put(KEY, "late")], nonce_key=NONCE))
        )
        thread.start()
        held = eventually(lambda: proxy.held_with(b"late"))
        thread.join(10)
        assert results == [(Outcome.UNKNOWN, 0)]
        assert value(other) == "0"
        proxy.release(held[:1])
        eventually(lambda: value(other) == "late")
        proxy.cut()
        proxy.holding = False
        proxy.heal()
        assert ours.write([compare], [Put(KEY, "again")], nonce_key=NONCE)[0] is Outcome.REFUSED
        assert value(ours) == "late"
        ours.close()


def test_compaction_below_a_watch_that_was_cut_off_is_a_gap(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    _, other = stores
    with Proxy(cluster.members[0].port) as proxy:
        ours = open_store(cluster.config(endpoints=(("127.0.0.1", proxy.port),)))
        listener = Listener(ours, put(other, "1"))
        put(other, "2")
        eventually(lambda: listener.told == ["2"])
        proxy.cut()
        put(other, "3")
        put(other, "4")
        cluster.compact()
        proxy.heal()
        eventually(lambda: "gap" in listener.told)
        put(other, "5")
        eventually(lambda: listener.told[-1] == "5")
        assert listener.told == ["2", "gap", "5"]
        ours.close()


def test_what_is_not_text_ends_no_watch(cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]) -> None:
    ours, other = stores
    listener = Listener(ours, put(other, "1"))
    bytes_of_nobody = base64.b64encode(b"\xff\xfe").decode()
    cluster.ask("/v3/kv/put", {"key": base64.b64encode(KEY.encode()).decode(), "value": bytes_of_nobody})
    put(other, "2")
    eventually(lambda: listener.told[-1:] == ["2"])
    assert listener.told == ["\ufffd\ufffd", "2"]
    cluster.ask("/v3/kv/put", {"key": base64.b64encode(KEY.encode()).decode(), "value": bytes_of_nobody})
    assert value(ours) == "\ufffd\ufffd"


def test_a_server_that_lost_its_data_is_a_gap(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        store = open_store(cluster.config(timeout_seconds=1.5))
        for number in range(20):
            revision = put(store, str(number))
        listener = Listener(store, revision)
        put(store, "more")
        eventually(lambda: listener.told == ["more"])
        cluster.members[0].kill()
        cluster.members[0].directory.rename(tmp_path / "away")
        cluster.restart()
        eventually(lambda: "gap" in listener.told)
        put(store, "new")
        eventually(lambda: listener.told[-1] == "new")
        store.close()


def test_a_watch_of_a_frozen_server_tells_all_after_the_thaw(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    ours, other = stores
    listener = Listener(ours, put(other, "1"))
    put(other, "2")
    eventually(lambda: listener.told)
    cluster.members[0].freeze()
    with pytest.raises(StoreUnavailableError):
        ours.read(KEY)
    cluster.members[0].thaw()
    put(other, "3")
    eventually(lambda: listener.told == ["2", "3"])


def test_one_of_three_members_may_be_frozen_or_killed_and_no_two(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "etcd", 3) as cluster:
        store = open_store(cluster.config(timeout_seconds=4), first=0)
        lease = store.grant(5)
        lost: list[str] = []
        keeper = LeaseKeeper(store, lease, on_lost=lambda: lost.append("lost"))
        keeper.start()
        store.write([], [Put("/elasticd/job/nodes/a", "", lease.id)])
        listener = Listener(store, put(store, "1"))
        put(store, "2")
        eventually(lambda: listener.told == ["2"])
        cluster.members[0].freeze()
        put(store, "3")
        cluster.members[0].thaw()
        eventually(lambda: listener.told == ["2", "3"])
        cluster.members[0].kill()
        put(store, "4")
        eventually(lambda: listener.told == ["2", "3", "4"])
        cluster.members[1].kill()
        with pytest.raises(StoreUnavailableError):
            store.read(KEY)
        cluster.restart(1)
        put(store, "5")
        eventually(lambda: listener.told == ["2", "3", "4", "5"])
        assert not lost
        assert "/elasticd/job/nodes/a" in store.read("/elasticd/job/nodes/a").entries
        keeper.close()
        store.close()


def test_while_etcd_is_away_nothing_spins_and_the_lease_is_doubted(
    cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]
) -> None:
    ours, other = stores
    listener = Listener(ours, put(other, "1"))
    doubted = threading.Event()
    keeper = LeaseKeeper(ours, ours.grant(2), on_lost=lambda: None, on_doubt=doubted.set)
    keeper.start()
    cluster.members[0].kill()
    begin, cpu = time.monotonic(), time.process_time()
    assert doubted.wait(5)
    assert keeper.in_doubt()
    time.sleep(max(0.0, begin + 2.5 - time.monotonic()))  # a span to measure in, not a wait for something
    assert time.process_time() - cpu < 0.15 * 2.5
    assert keeper.fence() < time.clock_gettime(time.CLOCK_BOOTTIME)
    cluster.restart()
    put(other, "2")
    eventually(lambda: listener.told == ["2"])
    keeper.close()


def test_a_dead_first_endpoint_costs_a_read_and_a_write_nothing(cluster: EtcdCluster) -> None:
    endpoints = (("127.0.0.1", free_ports(1)[0]), *cluster.endpoints)
    for _ in range(3):
        store = open_store(cluster.config(endpoints=endpoints), first=0)
        begin = time.monotonic()
        assert store.write([], [Put(KEY, "1")])[0] is Outcome.APPLIED  # not UNKNOWN, also without a nonce
        assert value(store) == "1"
        assert time.monotonic() - begin < 2.0  # a timeout is 3 s
        store.close()


def test_endpoints_of_two_clusters_are_told_apart(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "one") as one, etcd_cluster(tmp_path / "two") as two:
        store = open_store(one.config(endpoints=(*one.endpoints, *two.endpoints), timeout_seconds=1.5), first=0)
        put(store, "1")
        one.members[0].kill()
        with pytest.raises(StoreUnavailableError, match="belongs to another cluster"):
            store.read(KEY)
        store.close()


def test_closing_gives_threads_and_descriptors_back(cluster: EtcdCluster) -> None:
    def use() -> None:
        store = open_store(cluster.config())
        Listener(store, put(store, "1"))
        keeper = LeaseKeeper(store, store.grant(5), on_lost=lambda: None)
        keeper.start()
        put(store, "2")
        keeper.close()
        store.close()
        with pytest.raises(StoreUnavailableError, match="closed"):
            store.read(KEY)

    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    use()  # what grpc makes once and keeps
    before = held()
    for _ in range(5):
        use()
    eventually(lambda: held()[0] <= before[0] and held()[1] <= before[1])


def test_the_connection_is_not_inherited_by_children(cluster: EtcdCluster, stores: tuple[EtcdStore, EtcdStore]) -> None:
    put(stores[0], "1")
    code = "import os; print(*[os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        close_fds=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert "pipe:" in shown.stdout
    assert "socket:" not in shown.stdout
