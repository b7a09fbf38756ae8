"""What may happen to a member, or to its way to the store, at the moment that is worst for the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import StoreRefusedError, StoreUnavailableError
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.records import Keys
from elastic.rendezvous.store import Put
from tests.rendezvous.peers import Job, Peer, all_run
from tests.support.etcd import EtcdCluster, etcd_cluster, eventually
from tests.support.fake_store import FakeServer, FakeStore
from tests.support.proxy import Proxy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd") / "data") as cluster:
        yield cluster


@pytest.fixture
def proxy(cluster: EtcdCluster) -> Iterator[Proxy]:
    """The way of one node to etcd."""
    with Proxy(cluster.members[0].port) as proxy:
        yield proxy


@pytest.fixture
def job(cluster: EtcdCluster, proxy: Proxy, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(lambda: open_store(cluster.config()), request.node.name)
    yield made
    made.close()


def behind(proxy: Proxy, cluster: EtcdCluster, job: Job, name: str) -> Peer:
    store = open_store(cluster.config(endpoints=(("127.0.0.1", proxy.port),)))
    job.peers.append(Peer(store, name, run_id=job.run_id))
    return job.peers[-1]


def test_a_leaders_write_that_is_applied_after_the_next_leader_has_decided_changes_nothing(
    cluster: EtcdCluster, proxy: Proxy, job: Job
) -> None:
    a = behind(proxy, cluster, job, "a")
    job.until(lambda: a.view.is_leader)
    b = job.start("b")
    job.until(all_run([a, b]))
    number = a.running
    proxy.hold_from = b'"phase":"draining"'  # with which it asks for the drain that lets c in
    c = job.start("c")
    sizes: list[int] = []
    job.until(lambda: sizes.extend(proxy.held_with(b'"phase":"draining"')) or sizes)

    rest = [b, c]
    job.until(all_run(rest))
    assert (b.running, b.round and b.round.cause) == (number + 1, "node a lost")
    entry = b.store.read(Keys(job.run_id).round).entries[Keys(job.run_id).round]
    answered = proxy.answered_bytes
    proxy.release(sizes)
    eventually(lambda: proxy.answered_bytes > answered)
    assert b.store.read(entry.key).entries[entry.key] == entry
    proxy.cut()
    proxy.holding, proxy.hold_from = False, b""
    proxy.heal()
    job.until(all_run([a, b, c]))
    assert a.running == number + 2
    assert b.view.restarts_used == 0


def test_a_compaction_below_a_watch_that_was_cut_off_hides_no_end_of_a_round(
    cluster: EtcdCluster, proxy: Proxy, job: Job
) -> None:
    a = job.start("a")
    job.until(lambda: a.view.is_leader)
    b = behind(proxy, cluster, job, "b")
    job.until(all_run([a, b]))
    number = a.running
    gaps = b.store.counters()["gaps"]
    proxy.cut()
    a.fail()
    job.until(lambda: a.is_joining and not a.running)
    for text in "abc":  # so that what the watch would ask for next lies below
        a.store.write([], [Put("/elsewhere", text)])
    cluster.compact()
    cluster.ask("/v3/maintenance/defragment", {})
    proxy.heal()
    job.until(all_run([a, b]))
    assert a.running == number + 1, "it was no loss"
    job.until(lambda: b.store.counters()["gaps"] > gaps)
    job.until(lambda: a.view.restarts_used == b.view.restarts_used == 1)


@pytest.mark.parametrize("victim", ["the leader, which hosts the store", "another"])
def test_a_member_that_dies_between_the_decision_and_its_start_is_lost_like_any_other(victim: str) -> None:
    server = FakeServer(at_once=True)
    job = Job(lambda: FakeStore(server), "job")
    a = job.start("a")
    job.until(lambda: a.view.is_leader)
    b, c = job.start("b"), job.start("c")
    job.until(all_run([a, b, c]))
    number = a.running
    c.fail()
    job.until(lambda: all(peer.is_joining and not peer.running for peer in job.peers))
    eventually(lambda: all(peer.round and peer.round.number == number + 1 for peer in job.peers))
    lost = a if victim != "another" else b
    assert lost.view.is_leader == (lost is a)
    assert (lost.view.node_rank == 0) == (lost is a)
    lost.vanish()  # it has a seat and has not started
    rest = [peer for peer in job.peers if peer is not lost]
    job.until(all_run(rest))
    assert rest[0].running == number + 2
    job.until(lambda: all(peer.view.restarts_used == 1 for peer in rest))  # for the failure of c
    job.close()


def test_who_was_let_in_once_waits_for_a_store_that_refuses_it_now(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        cluster.enable_auth(("trainer", "secret", "/elasticd/job/"))
        settings = {"user": "trainer", "password": "secret", "timeout_seconds": 1.5}
        store, newcomer = open_store(cluster.config(**settings)), open_store(cluster.config(**settings))
        store.read("/elasticd/job/round")

        def change_password(to: str) -> None:
            token = cluster.ask("/v3/auth/authenticate", {"name": "root", "password": "root"})["token"]
            cluster.ask("/v3/auth/user/changepw", {"name": "trainer", "password": to}, token=token)
            cluster.revoke_tokens()

        change_password("other")
        with pytest.raises(StoreUnavailableError, match="ELASTICD_ETCD_PASSWORD"):
            store.read("/elasticd/job/round")
        with pytest.raises(StoreRefusedError, match="ELASTICD_ETCD_PASSWORD"):
            newcomer.read("/elasticd/job/round")
        change_password("secret")
        store.read("/elasticd/job/round")
        store.close()
        newcomer.close()
