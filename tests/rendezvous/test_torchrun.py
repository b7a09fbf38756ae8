"""Plain torchrun on our rendezvous, as its users start it: forms, loses a node, re-forms, takes one in, ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic.errors import UsageError
from elastic.rendezvous import torchrun
from elastic.rendezvous.torchrun import create_handler
from tests.support.etcd import EtcdCluster, etcd_cluster

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
GROUP = "torchrun.handlers"
WORKER = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

ledger, stop = Path(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")
while True:
    flag = torch.tensor([float(stop.exists())])
    dist.all_reduce(flag)
    with ledger.open("a") as out:
        out.write(f"{os.environ['NODE']} {dist.get_rank()} {dist.get_world_size()}\\n")
    if flag.item():
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster


def declared() -> str:
    """The entry point as pyproject.toml has it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return str(project["entry-points"][GROUP]["etcd3"])


def paths(tmp_path: Path) -> str:
    """PYTHONPATH for a process that finds these sources and their entry point, installed or not."""
    found = [str(ROOT)]
    if not any(point.name == "etcd3" and point.value == declared() for point in entry_points(group=GROUP)):
        info = tmp_path / "site" / "elasticd_here-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elasticd-here\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\netcd3 = {declared()}\n")
        found.append(str(info.parent))
    return os.pathsep.join(found)


class Torchrun:
    """One `torchrun` of a job; its log is beside the ledger."""

    def __init__(self, tmp_path: Path, cluster: EtcdCluster, node: str) -> None:
        script = tmp_path / "worker.py"
        script.write_text(WORKER)
        self.ledger = tmp_path / f"{node}.ledger"
        self.ledger.unlink(missing_ok=True)
        self.log = tmp_path / f"{node}.log"
        host, port = cluster.endpoints[0]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "etcd3", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"{host}:{port}", "--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-conf", f"lease_ttl=2,last_call=3,settle=0.2,join_timeout=60,node_id={node}"),
            *(str(script), str(self.ledger), str(tmp_path / "stop")),
        ]
        environ = {
            **os.environ,
            "PYTHONPATH": paths(tmp_path),
            "NODE": node,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)

    def seen(self) -> list[tuple[int, int]]:
        """Rank and world size of each pass of its worker."""
        if not self.ledger.exists():
            return []
        lines = self.ledger.read_text().splitlines()
        return [(int(rank), int(world)) for _, rank, world in (line.split() for line in lines)]

    def world(self) -> int:
        seen = self.seen()
        return seen[-1][1] if seen else 0

    def kill(self) -> None:
        """The machine is gone: agent and workers at once."""
        children = (Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")).read_text().split()
        os.kill(self.process.pid, signal.SIGKILL)
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()


def eventually(agents: list[Torchrun], condition: Callable[[], bool], seconds: float = 90.0) -> float:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            logs = "\n".join(f"== {agent.log.name}\n{agent.log.read_text()[-3000:]}" for agent in agents)
            raise AssertionError(f"still not true after {seconds} s\n{logs}")
        time.sleep(0.05)
    return time.monotonic() - started


def test_the_entry_point_is_declared_and_imports_no_client_library() -> None:
    module, _, name = declared().partition(":")
    code = (
        f"import sys, {module} as m; creator = m.{name}(); assert callable(creator); "
        "print([x for x in ('etcd3', 'grpc', 'google.protobuf') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def parameters(**conf: Any) -> RendezvousParameters:
    """As torchrun makes them: its own backends' timeout is always among them."""
    return RendezvousParameters("etcd3", "127.0.0.1:1", "job", 1, 2, "127.0.0.1", timeout=900, **conf)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"lease_tll": "2"}, r"--rdzv-conf: unknown key 'lease_tll' \(did you mean 'lease_ttl'\?\); known are lease"),
        ({"zone": "a"}, "--rdzv-conf: unknown key 'zone'; known are .*, user$"),
        ({"lease_ttl": "2.5"}, "--rdzv-conf: lease_ttl=2.5: '2.5' must be whole seconds"),
        ({"lease_ttl": "1"}, "--rdzv-conf: lease_ttl=1: give 2 seconds or more"),
        ({"settle": "soon"}, "--rdzv-conf: settle=soon: 'soon' is not a number of seconds"),
    ],
)
def test_what_rdzv_conf_cannot_mean_is_refused_by_name(conf: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_handler(parameters(**conf))


def test_what_rdzv_conf_says_is_what_the_member_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(torchrun, "make_member", lambda **options: made.update(options))
    create_handler(parameters(lease_ttl="3", settle="500ms", join_timeout="2m", node_id="n7", ca="c", user=None))
    assert (made["settings"].ttl_seconds, made["settings"].rules.settle_seconds) == (3, 0.5)
    assert (made["join_timeout_seconds"], made["settings"].node.node_id, made["etcd"].ca) == (120.0, "n7", "c")
    assert made["etcd"].user is None, "None is what is not given"


def test_a_host_that_is_frozen_while_it_is_greeted_is_given_up_in_time() -> None:
    """Its kernel takes the connection, and nothing answers: torch's own timeout does not end that."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        began = time.monotonic()
        with pytest.raises(OSError, match=r"no greeting from 127\.0\.0\.1"):
            torchrun._client("127.0.0.1", frozen.getsockname()[1], timedelta(seconds=1))
        assert time.monotonic() - began < 20


def test_a_store_that_cannot_be_reached_is_torchs_own_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(DistError):
        torchrun._client("127.0.0.1", port, timedelta(seconds=1))


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_forms_loses_a_node_re_forms_and_takes_it_in_again(tmp_path: Path, cluster: EtcdCluster) -> None:
    agents = [Torchrun(tmp_path, cluster, "a"), Torchrun(tmp_path, cluster, "b")]
    a, b = agents
    try:
        started = eventually(agents, lambda: a.world() == b.world() == 2)
        host, other = sorted(agents, key=lambda agent: agent.seen()[-1])  # who hosts the store is the one to lose
        host.kill()
        took = eventually(agents, lambda: other.world() == 1)
        assert took < started + 10.0  # a worker's start is the most of it; c10d waits 42 s on top
        again = Torchrun(tmp_path, cluster, "c")
        agents.append(again)
        eventually(agents, lambda: other.world() == again.world() == 2)
        (tmp_path / "stop").touch()
        assert (other.process.wait(30), again.process.wait(30)) == (0, 0), other.log.read_text()[-3000:]
        assert other.seen()[-1][0] == 0  # the survivor keeps the first rank
    finally:
        for agent in agents:
            agent.close()
