"""Who may use a checkpoint directory at the same time, and who is refused by name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.agent import job_lock
from elastic.agent.job_lock import JobLock
from elastic.errors import UsageError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lock, "_WAIT_SECONDS", 0.3)


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [
        pytest.param(None, None, r"agent with pid \d+", id="two jobs of one node"),
        pytest.param("big", None, "job big", id="of one node, beside one of many"),
        pytest.param(None, "big", r"agent with pid \d+", id="of many, beside one of one node"),
        pytest.param("big", "other", "job big", id="two jobs of many"),
        pytest.param("big", "big", "", id="two agents of one job"),
    ],
)
def test_a_checkpoint_directory_is_for_one_job(tmp_path: Path, first: str | None, second: str | None, who: str) -> None:
    ckpt = str(tmp_path / "ckpt")
    with contextlib.closing(JobLock(ckpt, tmp_path, run_id=first)):
        if who:
            with pytest.raises(UsageError, match=f"ckpt is in use by the {who}: drain that one first"):
                JobLock(ckpt, tmp_path, run_id=second)
        else:
            JobLock(ckpt, tmp_path, run_id=second).close()
        if first is not None:
            JobLock(ckpt, tmp_path, run_id=first).close()
    JobLock(ckpt, tmp_path, run_id=second).close()


RACE = """
import sys, time
from pathlib import Path
from elastic.agent import job_lock
from elastic.errors import UsageError
job_lock._WAIT_SECONDS = 2.0
time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
try:
    lock = job_lock.JobLock(sys.argv[1], Path(sys.argv[1]), run_id=sys.argv[2])
except UsageError:
    print("refused")
else:
    print(sys.argv[2], flush=True)
    time.sleep(3.0)
"""


def test_of_jobs_that_start_at_the_same_moment_one_has_it_with_all_its_agents(tmp_path: Path) -> None:

    at = str(time.time() + 2.0)
    started = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), run_id, at], stdout=subprocess.PIPE, text=True)
        for run_id in ("a", "b", "a", "b", "a", "b")
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in started]
    assert sorted(said) in (["a"] * 3 + ["refused"] * 3, ["b"] * 3 + ["refused"] * 3), said


def test_where_files_cannot_be_locked_the_lock_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flock = fcntl.flock

    def on_lustre(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(tmp_path / "ckpt"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", on_lustre)
    with contextlib.closing(JobLock(str(tmp_path / "ckpt"), tmp_path, run_id=None)):
        assert "ckpt cannot hold a lock: Function not implemented" in caplog.text
        assert list(tmp_path.glob("job-*.lock"))
