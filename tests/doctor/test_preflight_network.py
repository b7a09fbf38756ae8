"""Three nodes on cables of their own: one pair is cut, or slow, or one node's cable is; who it is gets named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_many_nodes_network import _HOST, Network, inside, ip, namespaces
from tests.support.etcd import etcd_cluster
from tests.support.job import wait_for
from tests.support.proxy import Proxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
        reason="needs root, ip and tc to make namespaces with slow cables",
    ),
]
SUBNET = _HOST.rpartition(".")[0]
NAMES = ("n1", "n2", "n3")


class Lab:
    """The namespaces n1, n2, n3 with addresses .1, .2, .3, and an etcd that all reach."""

    def __init__(self, folder: Path, network: Network, port: int) -> None:
        self.folder = folder
        self.network = network
        self.port = port
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [
            *(sys.executable, "-m", "elastic", "doctor", "--json", "--preflight", "--preflight-timeout", "60"),
            *("--http", "127.0.0.1:0", "--rdzv-backend", "etcd3", "--rdzv-endpoint", f"{_HOST}:{self.port}"),
            *("--rdzv-id", "job", "--nnodes", "3", "--node-id", name),
        ]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
        environ["GLOO_SOCKET_IFNAME"] = "host0"
        with (self.folder / f"{name}.log").open("wb") as log, (self.folder / f"{name}.json").open("wb") as out:
            self.started[name] = inside(
                self.network.namespaces[name], lambda: subprocess.Popen(command, env=environ, stdout=out, stderr=log)
            )

    def start_in_order(self) -> None:
        """n1 has the first node rank, and so the store."""
        for name in NAMES:
            self.start(name)
            wait_for(lambda name=name: "has joined" in self.log(name), seconds=60, what=f"{name} has joined")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self, name: str) -> tuple[int, list[dict[str, Any]]]:
        code = self.started[name].wait(180)
        findings = json.loads((self.folder / f"{name}.json").read_text())
        return code, [f for f in findings if f["check"] in ("pair", "node", "preflight", "all-reduce")]

    def cut(self, left: str, right: str) -> None:
        """No way between these two, either way."""
        for here, there in ((left, right), (right, left)):
            address = f"{SUBNET}.{NAMES.index(there) + 1}/32"
            ip("-n", self.network.namespaces[here], "route", "add", "blackhole", address)

    def slow_down(self, name: str) -> None:
        """What this node sends."""
        self._limit(name, "host0")

    def slow_cable(self, left: str, right: str) -> None:
        """A cable of their own between these two, which is slow."""
        spaces = self.network.namespaces
        ip("-n", spaces[left], "link", "add", "slow0", "type", "veth", "peer", "name", "slow0", "netns", spaces[right])
        for here in (left, right):
            ip("-n", spaces[here], "link", "set", "slow0", "up")
            self._limit(here, "slow0")
        for here, there in ((left, right), (right, left)):
            ip("-n", spaces[here], "route", "add", f"{SUBNET}.{NAMES.index(there) + 1}/32", "dev", "slow0")

    def _limit(self, name: str, device: str) -> None:
        limit = ("tbf", "rate", "160mbit", "burst", "256kb", "latency", "100ms")
        space = self.network.namespaces[name]
        command = ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", *limit]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    def close(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(etcd_cluster(tmp_path / "etcd"))
        network = Network(stack.enter_context(namespaces(*NAMES)), stack)
        proxy = stack.enter_context(Proxy(cluster.members[0].port, socket.create_server((_HOST, 0))))
        made = Lab(tmp_path, network, proxy.port)
        stack.callback(made.close)
        yield made


def messages(findings: list[dict[str, Any]], check: str, state: str) -> list[str]:
    return [f["message"] for f in findings if (f["check"], f["state"]) == (check, state)]


def test_a_pair_without_a_way_between_them_is_the_only_one_that_is_broken(lab: Lab) -> None:
    lab.cut("n2", "n3")
    lab.start_in_order()
    for name in NAMES:
        code, findings = lab.end(name)
        assert code == 1, lab.log(name)
        (broken,) = messages(findings, "pair", "error")
        assert broken.startswith("n2 - n3: "), broken
        assert len(messages(findings, "pair", "ok") + messages(findings, "pair", "warning")) == 2
        assert not messages(findings, "all-reduce", "ok")


def test_a_node_that_cannot_reach_the_stores_host_is_named_by_all(lab: Lab) -> None:
    lab.cut("n1", "n3")
    lab.start_in_order()
    ends = {name: lab.end(name) for name in NAMES}
    assert [code for code, _ in ends.values()] == [1, 1, 1]
    for name in ("n1", "n2"):
        errors = messages(ends[name][1], "pair", "error")
        assert any(error.startswith("n1 - n3: ") for error in errors), (errors, lab.log(name))
    (trouble,) = messages(ends["n3"][1], "preflight", "error")
    assert "the store of node n1 does not answer node n3" in trouble


def test_a_slow_pair_is_a_warning_with_both_names(lab: Lab) -> None:
    lab.slow_cable("n2", "n3")
    lab.start_in_order()
    for name in NAMES:
        _, findings = lab.end(name)
        assert not [f for f in findings if f["state"] == "error"], lab.log(name)
        assert any(slow.startswith("n2 - n3: 0.0") for slow in messages(findings, "pair", "warning")), findings


def test_a_node_with_a_slow_cable_is_blamed(lab: Lab) -> None:
    lab.slow_down("n3")
    lab.start_in_order()
    for name in NAMES:
        _, findings = lab.end(name)
        assert not [f for f in findings if f["state"] == "error"], lab.log(name)
        assert any("node n3" in blamed for blamed in messages(findings, "node", "warning")), findings
