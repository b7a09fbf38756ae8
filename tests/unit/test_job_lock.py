"""Who may use a checkpoint directory at the same time, and who is refused by name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import job_lock
from elastic.agent.job_lock import JobLock
from elastic.agent.leftovers import is_being_killed
from elastic.config import load
from elastic.errors import UsageError
from elastic.passing import is_away

NOBODY = 65534


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
from elastic.passing import is_away
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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK], ids=["Lustre", "NFS without lockd"])
def test_where_files_cannot_be_locked_the_lock_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    flock = fcntl.flock

    def there(descriptor: int, operation: int) -> None:
        is_there = Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(tmp_path / "ckpt")
        if is_there and not (number == errno.ENOLCK and operation == fcntl.LOCK_UN):  # which NFS always grants
            raise OSError(number, os.strerror(number))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", there)
    with contextlib.closing(JobLock(str(tmp_path / "ckpt"), tmp_path, run_id=None)) as lock:
        assert f"ckpt cannot hold a lock: {os.strerror(number)}" in caplog.text
        assert len(lock.descriptors) == len(list(tmp_path.glob("job-*.lock"))) == 1
        with pytest.raises(UsageError, match="is in use"):
            JobLock(str(tmp_path / "ckpt"), tmp_path, run_id=None)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_room)


@pytest.mark.parametrize("run_id", [None, "big"])
def test_a_full_disk_is_no_obstacle_and_the_lock_counts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str | None
) -> None:
    ckpt = str(tmp_path / "ckpt")
    JobLock(ckpt, tmp_path, run_id="of before").close()
    full_disk(monkeypatch)
    with contextlib.closing(JobLock(ckpt, tmp_path, run_id=run_id)):
        with pytest.raises(UsageError, match="in use by the agent with pid unknown"):
            JobLock(ckpt, tmp_path, run_id=None)
        if run_id is not None:
            JobLock(ckpt, tmp_path, run_id=run_id).close()  # another agent of the job, which cannot know


def test_a_drained_jobs_lock_keeps_its_room_on_the_disk_for_the_next_word(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    JobLock(str(ckpt), tmp_path, run_id=None).close()
    assert (ckpt / ".lock").read_text().strip() == ""
    assert (ckpt / ".lock").stat().st_size > 0


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_url_of_a_directory_is_that_directory(tmp_path: Path, scheme: str) -> None:
    ckpt, script = tmp_path / "ckpt", tmp_path / "train.py"
    script.touch()
    assert load([f"--checkpoint-dir={scheme}://{ckpt}", str(script)], {}).checkpoint_dir == str(ckpt)
    other = tmp_path / "run"
    other.mkdir()
    with contextlib.closing(JobLock(str(ckpt), tmp_path, run_id=None)):
        for runtime in (tmp_path, other):
            with pytest.raises(UsageError, match="is in use"):
                JobLock(f"{scheme}://{ckpt}", runtime, run_id=None)


def test_a_url_elsewhere_is_locked_on_this_host_from_whatever_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(JobLock("s3://bucket/run", tmp_path, run_id=None)):
        monkeypatch.chdir("/")
        with pytest.raises(UsageError, match="s3://bucket/run/ is in use"):
            JobLock("s3://bucket/run/", tmp_path, run_id=None)


def test_a_directory_that_was_read_only_at_the_start_of_a_job_is_still_its_own_when_it_is_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = tmp_path / "ckpt"
    (tmp_path / "link").symlink_to(ckpt)
    opened = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).is_relative_to(ckpt) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        first = JobLock(str(ckpt), tmp_path, run_id=None)
    assert "cannot hold a lock: Read-only file system" in caplog.text
    with contextlib.closing(first), pytest.raises(UsageError, match="is in use"):
        JobLock(str(tmp_path / "link"), tmp_path, run_id=None)


def test_a_disk_that_is_read_but_fails_to_write_is_locked_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = tmp_path / "ckpt"
    opened = os.open

    def broken(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).is_relative_to(ckpt) and flags & os.O_CREAT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", broken)
    with contextlib.closing(JobLock(str(ckpt), tmp_path, run_id=None)) as lock:
        assert "cannot hold a lock: Input/output error" in caplog.text
        assert len(lock.descriptors) == 1


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path.symlink_to(path.parent.parent / "precious"), id="link"),
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(Path.mkdir, id="directory"),
        pytest.param(make_socket, id="socket"),
    ],
)
def test_only_a_file_is_taken_for_a_lock(tmp_path: Path, make: Callable[[Path], object]) -> None:
    (tmp_path / "precious").write_text("of the job's user")
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    make(ckpt / ".lock")
    with pytest.raises(UsageError, match=rf"{ckpt}/.lock is a link, a pipe or a directory, not a file: remove it"):
        JobLock(str(ckpt), tmp_path, run_id=None)
    assert (tmp_path / "precious").read_text() == "of the job's user"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user gets into."""
    if os.geteuid():
        pytest.skip("becomes another user, so it needs root")
    with tempfile.TemporaryDirectory(prefix="elasticd-test-") as folder:
        Path(folder).chmod(0o755)
        ckpt = Path(folder) / "ckpt"
        ckpt.mkdir()
        ckpt.chmod(0o777)
        yield ckpt


@contextlib.contextmanager
def another_user(runtime: Path) -> Iterator[Path]:
    """This process is nobody for a while. Yields a runtime directory of theirs."""
    theirs = runtime.parent / "theirs"
    theirs.mkdir(exist_ok=True)
    os.chown(theirs, NOBODY, NOBODY)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield theirs
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.mark.parametrize("run_id", [None, "big"])
def test_another_users_job_is_refused_while_the_directory_is_in_use_and_let_in_afterwards(
    shared: Path, tmp_path: Path, run_id: str | None
) -> None:
    first = JobLock(str(shared), tmp_path, run_id=run_id)
    with another_user(shared) as theirs:
        with contextlib.closing(first), pytest.raises(UsageError, match="is in use by the"):
            JobLock(str(shared), theirs, run_id=None)
        second = JobLock(str(shared), theirs, run_id=None)
    with contextlib.closing(second), pytest.raises(UsageError, match="is in use by the"):
        JobLock(str(shared), tmp_path, run_id=run_id)


def test_a_lock_that_this_user_cannot_even_read_is_refused_with_its_owner_and_mode(
    shared: Path, tmp_path: Path
) -> None:
    JobLock(str(shared), tmp_path, run_id=None).close()
    (shared / ".lock").chmod(0o600)
    with (
        another_user(shared) as theirs,
        pytest.raises(UsageError, match=r"belongs to root \(mode 0600\) and cannot be r"),
    ):
        JobLock(str(shared), theirs, run_id=None)
    JobLock(str(shared), tmp_path, run_id=None).close()
    assert stat.S_IMODE((shared / ".lock").stat().st_mode) & 0o444 == 0o444  # its owner has opened it


def test_agents_of_another_job_do_not_share_a_lock_whose_word_they_may_not_write(shared: Path, tmp_path: Path) -> None:
    JobLock(str(shared), tmp_path, run_id="big").close()
    with another_user(shared) as theirs:
        JobLock(str(shared), theirs, run_id="big").close()
        with pytest.raises(UsageError, match="cannot be written by this user, and says that it is of job big: a job"):
            JobLock(str(shared), theirs, run_id="other")


def test_a_word_that_is_our_own_pid_is_of_a_dead_agent_or_of_another_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / ".lock").write_text(str(os.getpid()))
    warden = (ckpt / ".lock").open()
    fcntl.flock(warden, fcntl.LOCK_EX)
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"python\0-m\0elasticd")  # what /proc says of an agent
    lock = JobLock(str(ckpt), tmp_path, run_id=None, pause=lambda _: warden.close())
    assert warden.closed, "it was waited for"
    lock.close()


def test_a_directory_that_cannot_be_made_is_named_at_the_start(tmp_path: Path) -> None:
    """A typo, say: else it would train to its end and save nothing."""
    with pytest.raises(
        UsageError, match="--checkpoint-dir /proc/nowhere/ckpt is not there and cannot be made: No such"
    ):
        JobLock("/proc/nowhere/ckpt", tmp_path, run_id=None)


def test_what_an_agent_has_left_that_is_gone_is_named_and_one_that_is_about_to_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, environ = str(tmp_path / "ckpt"), {**os.environ, "ELASTICD_NONCE": "of a dead agent"}
    lock = JobLock(ckpt, tmp_path, run_id=None)
    worker = subprocess.Popen(["sleep", "60"], pass_fds=lock.descriptors, env=environ)
    try:
        lock.close()
        with pytest.raises(
            UsageError, match=rf"ckpt is in use by what the agent .* left behind: .*`kill -9 {worker.pid}`"
        ):
            JobLock(ckpt, tmp_path, run_id=None)
        assert not is_being_killed(worker.pid)
        monkeypatch.setattr(job_lock, "is_being_killed", lambda pid: pid == worker.pid)
        with pytest.raises(OSError, match=f"pid {worker.pid}. do not end") as told:  # as with a disk that hangs
            JobLock(ckpt, tmp_path, run_id=None)
        assert is_away(told.value), "which a start waits for"
    finally:
        worker.kill()
        worker.wait()
    JobLock(ckpt, tmp_path, run_id=None).close()
