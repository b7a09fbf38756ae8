"""The gateway against real servers that fail: killed, frozen, compacted, cut off, or not willing to let us in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import StoreRefusedError, StoreUnavailableError, UsageError
from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
from elastic.rendezvous.etcd_store import EtcdStore, open_store
from elastic.rendezvous.lease import LeaseKeeper
from elastic.rendezvous.store import Compare, Event, Outcome, Put
from tests.support.etcd import Certificates, EtcdCluster, etcd_cluster, eventually, free_ports
from tests.support.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
KEY = "/elasticd/job/round"
NONCE = "/elasticd/job/nonces/a"


class Listener:
    """A watch of KEY with what it told: values, and `gap`."""

    def __init__(self, store: EtcdStore, after_revision: int) -> None:
        self.told: list[str | None] = []
        store.watch(KEY, after_revision=after_revision, on_events=self._on_events, on_gap=self._on_gap)

    def _on_events(self, events: list[Event]) -> None:
        self.told += [event.entry.value if event.entry else None for event in events]

    def _on_gap(self) -> None:
        self.told.append("gap")


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


def put(store: EtcdStore, value: str) -> int:
    outcome, revision = store.write([], [Put(KEY, value)], nonce_key="/elasticd/job/nonces/other")
    assert outcome is Outcome.APPLIED
    return revision


def value(store: EtcdStore) -> str | None:
    entry = store.read(KEY).get(KEY)
    return entry.value if entry else None


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
    assert time.monotonic() - begin < 2 * 1.5 + 0.5
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
    assert keeper.half_gone()
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
        assert time.monotonic() - begin < 0.5
        store.close()


def test_endpoints_of_two_clusters_are_told_apart(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "one") as one, etcd_cluster(tmp_path / "two") as two:
        store = open_store(one.config(endpoints=(*one.endpoints, *two.endpoints), timeout_seconds=1.5), first=0)
        put(store, "1")
        one.members[0].kill()
        with pytest.raises(StoreUnavailableError, match="belongs to another cluster"):
            store.read(KEY)
        store.close()


def refused(config: EtcdConfig, key: str = KEY) -> str:
    store = open_store(config)
    begin = time.monotonic()
    with pytest.raises(StoreRefusedError) as caught:
        store.read(key)
    with pytest.raises(StoreRefusedError):
        store.write([], [Put(key, "")], nonce_key=NONCE)
    assert time.monotonic() - begin < 2
    store.close()
    assert "secret" not in str(caught.value) + repr(config)
    return str(caught.value)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster


def test_password_and_permission(own_cluster: EtcdCluster) -> None:
    cluster = own_cluster
    put(store := open_store(cluster.config()), "1")
    store.close()
    assert "no authentication" in refused(cluster.config(user="trainer", password="secret"))
    cluster.enable_auth(("trainer", "secret", "/elasticd/job/"))
    store = open_store(cluster.config(user="trainer", password="secret"))
    listener = Listener(store, put(store, "2"))
    assert "ELASTICD_ETCD_PASSWORD" in refused(cluster.config(user="trainer", password="wrong secret"))
    assert "--etcd-user" in refused(cluster.config())
    denied = refused(cluster.config(user="trainer", password="secret"), "/elasticd/of-others/round")
    assert "denies permission" in denied
    assert "'trainer'" in denied
    cluster.revoke_tokens()
    put(store, "3")
    eventually(lambda: listener.told == ["3"])
    store.close()


def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    cert, key = map(str, ours.client)
    with etcd_cluster(tmp_path / "etcd", certificates=ours, client_certificates=True) as cluster:
        store = open_store(cluster.config(cert=cert, key=key))
        put(store, "1")
        assert value(store) == "1"
        store.close()
        assert "--etcd-ca" in refused(cluster.config(ca=str(theirs.ca), cert=cert, key=key))
        cert, key = map(str, theirs.client)
        assert "--etcd-cert" in refused(cluster.config(cert=cert, key=key))
        assert "cannot be read" in refused(cluster.config(ca=str(tmp_path / "none.pem")))
        plain = open_store(cluster.config(ca=None, timeout_seconds=1))
        with pytest.raises(StoreUnavailableError):
            plain.read(KEY)
        plain.close()


def test_a_host_without_an_address_is_named() -> None:
    message = refused(EtcdConfig(endpoints=(("no-such-host.invalid", 2379),), timeout_seconds=3))
    assert "no-such-host.invalid" in message
    assert "--rdzv-endpoint" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoints": ()}, "--rdzv-endpoint"),
        ({"cert": "a"}, "need each other"),
        ({"cert": "a", "key": "b"}, "--etcd-ca"),
        ({"user": "a"}, "ELASTICD_ETCD_PASSWORD"),
        ({"timeout_seconds": 0}, "more than 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EtcdConfig(**{"endpoints": (("h", 1),), **settings})  # type: ignore[arg-type]  # that is the point


def test_endpoints_are_read_from_a_comma_list() -> None:
    assert parse_endpoints("h1:2379,h2, [::1]:99") == (("h1", 2379), ("h2", 2379), ("::1", 99))
    with pytest.raises(UsageError, match="https://h"):
        parse_endpoints("https://h:1")


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


def run_clean(code: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    environ.pop("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("before", ["", "os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'upb'"])
def test_loading_etcd3_leaves_the_environment_as_it_was(before: str) -> None:
    code = f"import os\n{before}\nb = dict(os.environ)\nimport elastic.rendezvous.etcd\nassert b == dict(os.environ)\n"
    # What a worker would inherit is the process's environment, not Python's copy of it.
    done = run_clean(
        code + "import sys; sys.stdout.flush(); os.system('printenv PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("upb" if before else "")


def test_protobuf_loaded_before_in_another_implementation_is_explained() -> None:
    done = run_clean("import google.protobuf.descriptor\nimport elastic.rendezvous.etcd")
    assert done.returncode != 0
    assert "UsageError" in done.stderr
    assert "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python" in done.stderr


def test_the_store_alone_does_not_load_etcd3() -> None:
    code = "import sys, elastic.rendezvous.etcd_store, elastic.rendezvous.lease\n"
    done = run_clean(code + "print([m for m in ('etcd3', 'grpc', 'google.protobuf', 'torch') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr
