"""What a job gives away on its host: command lines, environments, logs, status, and the modes of its files."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tests.support.job import Job, running, wait_for, write

PASSWORD, TOKEN = "pass-of-etcd-2718", "token-of-http-3141"
SETTINGS = """
http = "0.0.0.0:0"
http_token_file = "token"
lease_ttl = 2
log_dir = "logs"
checkpoint_dir = "ckpt"
checkpoint_every = 1
duplicate_stdout_filters = "rank"

[nccl]
NCCL_ALGO = "Ring"
NCCL_IB_DISABLE = true
"""
WORKER = """
import os, time
from pathlib import Path
print("rank", os.environ["RANK"], flush=True)
while not Path("end").exists():
    time.sleep(0.02)
"""


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def asked(job: Job, path: str) -> str:
    """Over TCP, with the token."""
    port = int(job.output.partition("http://0.0.0.0:")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    refused = connection.getresponse()
    assert (refused.status, refused.read().count(b"Bearer")) == (401, 1)
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == 200, text
    return text


@pytest.mark.parametrize("kind", ["script", pytest.param("program", marks=pytest.mark.slow)])
def test_no_secret_is_in_command_lines_environments_logs_or_status_and_files_are_closed_to_others(
    tmp_path: Path, kind: str
) -> None:
    write(tmp_path, "job.toml", SETTINGS)
    write(tmp_path, "token", TOKEN).chmod(0o600)
    script = write(tmp_path, "worker.py", "#!/usr/bin/env python3\n" + WORKER)
    script.chmod(0o755)
    target = ("--no-python", str(script)) if kind == "program" else (str(script),)
    with running(tmp_path, "--config", "job.toml", *target, environ={"ELASTICD_ETCD_PASSWORD": PASSWORD}) as job:
        status = job.wait_status(lambda s: s["workers"] and list(tmp_path.glob("logs/**/stdout.log")))
        said = [*(asked(job, path) for path in ("/status", "/metrics")), str(status)]
        workers = {worker["pid"] for worker in status["workers"]}
        for pid in job.processes():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            given = environ_of(pid).decode()
            assert PASSWORD not in command and TOKEN not in command
            assert TOKEN not in given
            assert (PASSWORD in given) == (pid == job.process.pid), command
            if pid in workers:
                assert {"NCCL_ALGO=Ring", "NCCL_IB_DISABLE=1"} <= set(given.split("\0"))
        assert status["nccl"] == {"NCCL_ALGO": "Ring", "NCCL_IB_DISABLE": "1"}
        assert "--http on 0.0.0.0: the token crosses the network unencrypted" in job.output
        assert "NCCL: NCCL_ALGO=Ring, NCCL_IB_DISABLE=1" in job.output
        open_to_others = [
            f"{path} {path.stat().st_mode & 0o777:o}"
            for folder in ("logs", "ckpt", "run")
            for path in (tmp_path / folder).rglob("*")
            if not path.is_dir() and path.stat().st_mode & 0o027
        ]
        assert open_to_others == []
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "ckpt").stat().st_mode & 0o027 == 0
        write(tmp_path, "end", "")
        assert job.wait() == 0, job.output
        kept = [path.read_text(errors="replace") for path in tmp_path.glob("logs/**/*") if path.is_file()]
        wait_for(lambda: "the job has succeeded" in job.output, seconds=5)
        for text in [*said, *kept, job.output]:
            assert PASSWORD not in text and TOKEN not in text
