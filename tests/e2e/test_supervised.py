"""Agents under a service manager, which is a socket here: what a restart by it finds, and what is given back for it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.job import Job, running, wait_for, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as found:
        yield found


@pytest.fixture
def notify_socket(tmp_path: Path) -> Iterator[str]:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)  # nobody reads: what does not fit is told again
        yield str(tmp_path / "notify")


def flags(cluster: EtcdCluster, script: Path) -> list[str]:
    ((host, port),) = cluster.endpoints
    etcd = ["--rdzv-backend", "etcd3", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "j", "--node-id", "a"]
    return [*etcd, "--lease-ttl", "30", "--last-call", "0.1", "--http", "127.0.0.1:0", str(script)]


def test_an_agent_restarted_after_a_crash_takes_the_outcome_it_finds_and_trains_nothing(
    tmp_path: Path, cluster: EtcdCluster, notify_socket: str
) -> None:
    script = write(tmp_path, "once.py", "import pathlib; pathlib.Path('starts').open('a').write('x')\n")
    environ = {"NOTIFY_SOCKET": notify_socket}
    for was_killed, starts in ((False, "x"), (True, "x"), (False, "xx")):
        if was_killed:
            (tmp_path / "run" / "running").touch()
        with running(tmp_path, *flags(cluster, script), environ=environ) as job:
            assert job.wait() == 0, job.output
        assert (tmp_path / "starts").read_text() == starts, job.output


def test_the_lease_of_a_killed_agent_is_given_back_but_not_that_of_a_live_one(
    tmp_path: Path, cluster: EtcdCluster
) -> None:
    script = write(tmp_path, "long.py", "import time; time.sleep(600)\n")
    with running(tmp_path, *flags(cluster, script)) as job:
        job.wait_status(lambda s: s["workers"])
        give_back(job)
        assert job.process.poll() is None
        workers = job.processes() - {job.process.pid}
        job.signal(signal.SIGKILL)
        job.process.wait()
        assert "gave back the lease" in give_back(job)
        wait_for(lambda: not job.processes() & workers)
    assert not list((tmp_path / "run").glob("agent-*"))
    assert not list((tmp_path / "shm").iterdir())


def give_back(job: Job) -> str:
    """What `ExecStopPost` says."""
    command = [sys.executable, "-m", "elastic", "give-back"]
    done = subprocess.run(command, env=job.environ, capture_output=True, text=True, timeout=30, check=True)
    return done.stderr
