"""Fifty rounds of one job on a real etcd: what is left of them in its key space."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.records import Keys
from tests.rendezvous.peers import RULES, Peer, all_run, until
from tests.support.etcd import EtcdCluster, etcd_cluster, eventually

ROUNDS = 50
RULES_OF_MANY_ROUNDS = dataclasses.replace(RULES, settle_seconds=0.0, max_restarts=1000, restart_window_seconds=1.0)
DEAD_PID = 4_194_305  # above the highest that Linux gives: an agent of it is known to be dead, its key is taken over
DIGIT_BYTES = 128  # the numbers of rounds and revisions get longer; three bytes a round would be more than this


class Job:
    """Three nodes; each `turn` ends their round in another way."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self.cluster = cluster
        self.keys = Keys("growth")
        self.reader = open_store(cluster.config())
        self.all: list[Peer] = []
        self.peers = [self.start(name) for name in ("node000", "node001", "node002")]

    def start(self, name: str) -> Peer:
        store = open_store(self.cluster.config())
        peer = Peer(store, name, rules=RULES_OF_MANY_ROUNDS, run_id=self.keys.run_id, pid=DEAD_PID)
        self.all.append(peer)
        return peer

    def turn(self, number: int) -> None:
        """A failure that is charged, a lost node that is back under its id, a node that leaves and a new one."""
        position = number // 3 % len(self.peers)
        peer = self.peers[position]
        if number % 3 == 0:
            peer.fail()
        elif number % 3 == 1:
            peer.vanish()
            self.peers[position] = self.start(peer.view.node_id)
        else:
            peer.go()
            self.peers[position] = self.start(f"node{number + 3:03}")

    def stored(self) -> dict[str, int]:
        """Bytes by key, but for the charges: those go with the restart window."""
        entries = self.reader.read(self.keys.prefix, prefix=True).entries
        return {key: len(entry.value) for key, entry in entries.items() if "/charges/" not in key}

    def charges(self) -> int:
        return len(self.reader.read(f"{self.keys.prefix}charges/", prefix=True).entries)

    def leases(self) -> int:
        return len(self.cluster.ask("/v3/lease/leases", {}).get("leases", []))

    def close(self) -> None:
        for peer in self.all:
            peer.close()
        for peer in self.all:
            if peer.closing is not None:
                peer.closing.join()
        self.reader.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        made = Job(cluster)
        yield made
        made.close()


def test_keys_bytes_and_leases_do_not_grow_with_the_rounds(job: Job) -> None:
    sizes = []
    turn = number = 0
    while number <= ROUNDS:
        until(job.peers, all_run(job.peers))
        number = job.peers[0].running
        sizes.append(job.stored())
        names = {job.keys.node(peer.view.node_id) for peer in job.peers}
        assert sizes[-1].keys() == {job.keys.round, job.keys.leader, *names}
        job.turn(turn)
        turn += 1
    until(job.peers, all_run(job.peers))
    # At times the leader still tells of nodes that wait.
    first, last = (statistics.median(sum(found.values()) for found in part) for part in (sizes[:10], sizes[-10:]))
    assert last <= first + DIGIT_BYTES, sizes
    eventually(lambda: job.charges() == 0)
    eventually(lambda: job.leases() == len(job.peers))
