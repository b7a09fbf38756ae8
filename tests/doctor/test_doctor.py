"""`elasticd doctor` from outside, on this host and with a real etcd."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.doctor import main
from elastic.errors import UsageError
from elastic.rendezvous.etcd_store import open_store
from tests.support.etcd import Certificates, etcd_cluster, free_ports


def doctor(*argv: str, **environ: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit code, and the findings by the name of their check."""
    out = io.StringIO()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    with contextlib.redirect_stdout(out):
        code = main(["--json", "--http", "127.0.0.1:0", *argv], {**kept, **environ})
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(out.getvalue()):
        found.setdefault(finding["check"], []).append(finding)
    return code, found


def test_a_node_alone_is_looked_at_without_a_script(tmp_path: Path) -> None:
    code, found = doctor("--checkpoint-dir", str(tmp_path))
    errors = [line for lines in found.values() for line in lines if line["state"] == "error"]
    assert (code, errors) == (0, [])
    assert {"python", "torch", "cuda", "interfaces", "http port", "descriptors", "checkpoint speed"} <= set(found)
    assert "etcd" not in found
    assert not list(tmp_path.iterdir())


def test_a_job_file_names_what_is_looked_at_and_a_flag_beats_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    job = tmp_path / "big.toml"
    job.write_text(f'script = "{tmp_path}/train.py"\nnnodes = 1\ncheckpoint_dir = "{job}"\n')
    with pytest.raises(UsageError, match="is a file, not a directory"):
        doctor(str(job))
    code, found = doctor(str(job), "--checkpoint-dir", str(tmp_path / "ckpt"))
    assert code == 0
    assert "elasticd@big.service" in found["unit"][0]["message"]


def test_settings_that_run_would_refuse_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--lease-ttl"):
        doctor("--lease-ttl", "1")
    with pytest.raises(UsageError, match="no-such"):
        doctor("--no-such-flag")


def test_the_command_prints_lines_for_people_and_its_exit_code_says_whether_there_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic", "doctor"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (helped.returncode, "--preflight-timeout" in helped.stdout) == (0, True)
    (tmp_path / "token").write_text("word")
    (tmp_path / "token").chmod(0o600)
    flags = ["--http", "203.0.113.1:1", "--http-token-file", str(tmp_path / "token")]
    done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    (wrong,) = [number for number, line in enumerate(lines) if line.startswith("error")]
    assert "203.0.113.1:1 cannot be served" in lines[wrong]
    assert "-> give --http" in lines[wrong + 1]
    assert lines[-1].startswith("this node is not fit to train: ")
    assert "\x1b" not in done.stdout


def test_etcd_with_tls_and_a_role_for_the_job_alone(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    made = Certificates(tmp_path / "tls")
    cert, key = map(str, made.client)
    access = ["--etcd-ca", str(made.ca), "--etcd-cert", cert, "--etcd-key", key]
    with etcd_cluster(tmp_path / "etcd", certificates=made, client_certificates=True) as cluster:
        cluster.enable_auth(("trainer", "secret", "/elasticd/job/"))
        port = cluster.members[0].port
        dead = free_ports(1)[0]
        many = ["--rdzv-backend", "etcd3", "--rdzv-endpoint", f"127.0.0.1:{dead},127.0.0.1:{port}", "--nnodes", "1:2"]

        def ask(run_id: str, password: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
            flags = [*many, "--rdzv-id", run_id, *access, "--etcd-user", "trainer"]
            return doctor(*flags, ELASTICD_ETCD_PASSWORD=password)

        code, found = ask("job", "secret")
        assert [line["state"] for line in found["etcd"]] == ["warning", "ok"], found["etcd"]
        assert code == 0
        assert found["etcd write"][0]["state"] == "ok"
        assert found["clock"][0]["state"] == "ok", "etcd runs on this very host"
        assert found["etcd version"][0]["state"] == "ok"
        store = open_store(cluster.config(cert=cert, key=key, user="root", password="root"))
        assert not store.read("/elasticd/", prefix=True).entries
        store.close()

        code, found = ask("of-others", "secret")
        assert code == 1
        assert "denies permission" in found["etcd"][1]["message"]
        code, found = ask("job", "wrong-secret")
        assert code == 1
        assert "ELASTICD_ETCD_PASSWORD" in found["etcd"][1]["message"]
        assert "wrong-secret" not in json.dumps(found)
        code, found = doctor(*many, "--rdzv-id", "job")
        assert code == 1
        assert "--etcd-ca" in json.dumps(found["etcd"])
