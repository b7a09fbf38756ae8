"""Three nodes measure their network: on loopback with a real etcd, whole, with one frozen, with one cable cut."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import UsageError
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.overview import job_overview
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.job import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
]  # torch is imported by three processes, and a broken pair takes its time


class Node:
    """One `elasticd doctor --preflight`."""

    def __init__(self, folder: Path, cluster: EtcdCluster, name: str, *flags: str, nodes: int = 3) -> None:
        self.folder = folder
        self.name = name
        self._log = folder / f"{name}.log"
        self._out = folder / f"{name}.json"
        port = cluster.members[0].port
        command = [
            *(sys.executable, "-m", "elastic", "doctor", "--json", "--preflight", "--http", "127.0.0.1:0"),
            *("--rdzv-backend", "etcd3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
            *("--nnodes", str(nodes), "--node-id", name, *flags),
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**kept, "GLOO_SOCKET_IFNAME": "lo"}, stdout=out, stderr=log
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def rank(self) -> str:
        """Its node rank, once the nodes have met."""

        def said() -> str:
            assert self.process.poll() is None, self.log
            return self.log.partition("node rank ")[2][:1]

        return wait_for(said, seconds=150, what=f"{self.name} has met the others")

    def end(self, seconds: float = 60) -> tuple[int, list[dict[str, Any]]]:
        code = self.process.wait(seconds)
        text = self._out.read_text()
        assert text, self.log
        measured = ("pair", "all-reduce", "node", "preflight")
        return code, [finding for finding in json.loads(text) if finding["check"] in measured]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as made:
        yield made


@contextlib.contextmanager
def started(folder: Path, cluster: EtcdCluster, *flags: str) -> Iterator[list[Node]]:
    made = [Node(folder, cluster, name, *flags) for name in ("n1", "n2", "n3")]
    try:
        yield made
    finally:
        for node in made:
            node.process.kill()
            node.process.wait(10)


def test_every_pair_and_the_all_reduce_are_measured_and_every_node_says_the_same(
    tmp_path: Path, cluster: EtcdCluster
) -> None:
    with started(tmp_path, cluster) as nodes:
        ends = [node.end(150) for node in nodes]
        assert [code for code, _ in ends] == [0, 0, 0], [node.log for node in nodes]
    for _, findings in ends:
        pairs = {f["message"].partition(":")[0] for f in findings if f["check"] == "pair"}
        assert {frozenset(pair.split(" - ")) for pair in pairs} == {
            frozenset(pair) for pair in (("n1", "n2"), ("n1", "n3"), ("n2", "n3"))
        }
        assert {f["state"] for f in findings} <= {"ok", "warning"}  # the other tests' load may slow one pair down
        (whole,) = [f for f in findings if f["check"] == "all-reduce"]
        assert "16 MiB over 3 nodes (gloo)" in whole["message"]
    store = open_store(cluster.config())
    with pytest.raises(UsageError, match="no job 'job'"):
        job_overview(store, "job")
    store.close()


@pytest.mark.parametrize("frozen_rank", ["2", "0"], ids=["a node", "the store's host"])
def test_a_frozen_node_is_named_with_its_peers_and_ends_nobody_else(
    tmp_path: Path, cluster: EtcdCluster, frozen_rank: str
) -> None:
    with started(tmp_path, cluster, "--preflight-timeout", "60") as nodes:
        frozen = next(node for node in nodes if node.rank() == frozen_rank)
        frozen.process.send_signal(signal.SIGSTOP)
        others = [node for node in nodes if node is not frozen]
        for node in others:
            code, findings = node.end(150)
            errors = [f["message"] for f in findings if f["state"] == "error"]
            assert code == 1
            assert any(frozen.name in message and node.name in message for message in errors), (findings, node.log)
            if frozen_rank == "2":
                works = [f["message"] for f in findings if f["state"] == "ok"]
                assert any(all(other.name in message for other in others) for message in works), findings


def test_nodes_that_do_not_come_are_an_error_in_time(tmp_path: Path, cluster: EtcdCluster) -> None:
    alone = Node(tmp_path, cluster, "n1", "--preflight-timeout", "6")
    try:
        code, findings = alone.end(60)
    finally:
        alone.process.kill()
    assert code == 1
    assert "did not meet" in findings[0]["message"]
