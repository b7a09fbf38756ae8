"""Nodes in network namespaces of their own: one is cut off and healed; hosts that know no other address than ::1."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.e2e.nodes import SLACK, STEPS, SUPPORT, TTL, Nodes, no_later_than, pids
from tests.support.beating_script import assert_rounds_never_overlap
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.job import Job, wait_for, write
from tests.support.proxy import Proxy

T = TypeVar("T")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip to make namespaces"),
]
_CLONE_NEWNET = 0x40000000
_HOST = "198.18.77.254"  # of the range for trials; the namespaces have .1, .2 ...


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def inside(namespace: str, act: Callable[[], T]) -> T:
    """What `act` gives in a thread that is in the namespace; the processes and sockets that it makes stay there."""

    def enter() -> T:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{namespace}").open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        return act()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result(30)


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[dict[str, str]]:
    """A network namespace for each name, with nothing but loopback in it; gone afterwards, with all its interfaces."""
    full = {name: f"elasticd-{os.getpid()}-{name}" for name in names}
    with contextlib.ExitStack() as stack:
        for namespace in full.values():
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        yield full


class Network:
    """Namespaces on one bridge with this host; each can be cut off."""

    def __init__(self, namespaces: dict[str, str], stack: contextlib.ExitStack) -> None:
        self.namespaces = namespaces
        bridge = f"eb{os.getpid()}"
        self._cables = {name: f"ev{os.getpid()}{index}" for index, name in enumerate(namespaces, start=1)}
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{_HOST}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index, (name, namespace) in enumerate(namespaces.items(), start=1):
            ip("link", "add", self._cables[name], "type", "veth", "peer", "name", "host0", "netns", namespace)
            ip("link", "set", self._cables[name], "master", bridge, "up")
            ip("-n", namespace, "addr", "add", f"{_HOST.rpartition('.')[0]}.{index}/24", "dev", "host0")
            ip("-n", namespace, "link", "set", "host0", "up")

    def cut(self, name: str) -> None:
        ip("link", "set", self._cables[name], "down")

    def heal(self, name: str) -> None:
        ip("link", "set", self._cables[name], "up")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_node_whose_network_is_cut_is_fenced_and_comes_back_as_a_newcomer_when_it_is_healed(
    tmp_path: Path, etcd: EtcdCluster, stack: contextlib.ExitStack
) -> None:
    network = Network(stack.enter_context(namespaces("a", "b")), stack)
    proxy = stack.enter_context(Proxy(etcd.members[0].port, socket.create_server((_HOST, 0))))
    state = tmp_path / "cut" / "state"
    worker = (str(SUPPORT / "beating_script.py"), str(STEPS), "0.02", str(state))
    settings = ("--nnodes", "1:2", "--max-restarts", "0", "--rdzv-endpoint", f"{_HOST}:{proxy.port}")
    nodes = Nodes(tmp_path, etcd, "cut", *settings, worker=worker)
    stack.callback(nodes.close)
    for name in "ab":
        inside(network.namespaces[name], lambda name=name: nodes.start(name))
    status = nodes.wait_running(2)
    assert {node["addr"] for node in status["nodes"]} == {"198.18.77.1", "198.18.77.2"}

    for cut in (nodes.leader, *({"a", "b"} - {nodes.leader})):
        (stays,) = {"a", "b"} - {cut}
        old = pids(nodes.wait(lambda s: s["workers"], cut))
        network.cut(cut)
        began = time.monotonic()
        alone = nodes.wait_running(1, stays, after=status["round"])
        no_later_than(began, TTL + SLACK)
        assert not old & nodes.jobs[cut].processes(), "who is cut off stops before the others go on"
        nodes.wait_further(stays)
        wait_for(lambda began=began: time.monotonic() > began + 2 * TTL, seconds=3 * TTL)
        nodes.jobs[cut].wait_status(lambda s: s["state"] in ("waiting", "joining"))
        network.heal(cut)
        healed = time.monotonic()
        status = nodes.wait_running(2, after=alone["round"])
        no_later_than(healed, 10 + SLACK)  # TCP's own back-off, and ours
        assert status["round"] == alone["round"] + 1
        assert status["restarts"]["used"] == 0
    assert_rounds_never_overlap(state)


MEETING = """
import os, time
from torch.distributed import TCPStore
address = os.environ["MASTER_ADDR"]
store = TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
store.add("met", 1)
deadline = time.monotonic() + 60
while store.add("met", 0) < 2:
    assert time.monotonic() < deadline, "nobody else came"
    time.sleep(0.05)
os.write(1, f"met at {address}\\n".encode())
"""


def test_hosts_that_have_only_the_address_of_ipv6_loopback_find_the_store_and_each_other(
    tmp_path: Path, etcd: EtcdCluster, stack: contextlib.ExitStack
) -> None:
    namespace = stack.enter_context(namespaces("six"))["six"]
    ip("-n", namespace, "addr", "del", "127.0.0.1/8", "dev", "lo")
    listener = inside(namespace, lambda: socket.create_server(("::1", 0), family=socket.AF_INET6))
    proxy = stack.enter_context(Proxy(etcd.members[0].port, listener))
    script = str(write(tmp_path, "script.py", MEETING))
    settings = ("--nnodes", "2:2", "--rdzv-endpoint", f"[::1]:{proxy.port}", "--http", "[::1]:0")
    nodes = Nodes(tmp_path, etcd, "six", *settings, worker=(script,))
    stack.callback(nodes.close)
    inside(namespace, lambda: nodes.start("a", "b"))
    assert nodes.ends() == {"a": 0, "b": 0}, nodes.output
    assert nodes.output.count("met at ::1") == 2

    job = inside(namespace, lambda: Job(tmp_path, "--http", "[::1]:0", "--nproc-per-node", "2", script))
    stack.callback(job.close)
    assert job.wait() == 0, job.output
    assert job.output.count("met at ::1") == 2
