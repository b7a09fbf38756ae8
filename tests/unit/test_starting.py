"""What an agent waits for before its loop begins: that it passes is noticed, and signals are heard meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent import starting
from elastic.agent.assembly import highest_round
from elastic.agent.job_lock import JobLock
from elastic.agent.mailbox import Mailbox
from elastic.agent.starting import Start, StoppedError
from elastic.agent.systemd import Notifier
from elastic.errors import ExitCode, StorageGoneError, UsageError

AWAY = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with contextlib.closing(Mailbox()) as made:
        made.take_signals((signal.SIGTERM, signal.SIGHUP))
        yield made


def start(mailbox: Mailbox, *, patience_seconds: float = 30.0) -> Start:
    return Start(mailbox, Notifier({}), usr1_drains=False, patience_seconds=patience_seconds)


def fail(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", AWAY)
def test_a_file_server_that_is_away_is_waited_for_and_said_once(
    mailbox: Mailbox, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "_AGAIN_SECONDS", 0.01)
    caplog.set_level("INFO")
    answers = iter([fail(number), fail(number), 7])

    def attempt() -> int:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    assert start(mailbox).reach("--checkpoint-dir /ck", attempt) == 7
    assert caplog.text.count(f"--checkpoint-dir /ck: {os.strerror(number)}: it is tried until --join-timeout (30") == 1
    assert "--checkpoint-dir /ck: that has passed" in caplog.text


def test_a_file_server_that_stays_away_ends_the_agent_with_a_code_that_systemd_restarts_on(mailbox: Mailbox) -> None:
    def attempt() -> int:
        raise fail(errno.ESTALE)

    with pytest.raises(StorageGoneError, match=r"ck has not answered for 0 s \(--join-timeout\): Stale") as caught:
        start(mailbox, patience_seconds=0.0).reach("--checkpoint-dir /ck", attempt)
    assert caught.value.exit_code is ExitCode.STORE_GONE


def test_what_does_not_pass_is_not_waited_for(mailbox: Mailbox) -> None:
    def attempt() -> int:
        raise fail(errno.EACCES)

    with pytest.raises(PermissionError):
        start(mailbox).reach("--checkpoint-dir /ck", attempt)


@pytest.mark.parametrize("number", AWAY)
def test_both_looks_into_the_checkpoint_directory_tell_that_its_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    directory = tmp_path / "ck"

    def away(path: Path, *_: object, **__: object) -> None:
        raise fail(number)

    monkeypatch.setattr(Path, "mkdir", away)
    monkeypatch.setattr(Path, "iterdir", away)
    with pytest.raises(OSError, match=os.strerror(number)):
        JobLock(str(directory), tmp_path, run_id=None)
    with pytest.raises(OSError, match=os.strerror(number)):
        highest_round(str(directory))


def test_a_checkpoint_directory_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: Path) -> None:
        raise fail(errno.EACCES)

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(UsageError, match=f"--checkpoint-dir {tmp_path}: Permission denied"):
        highest_round(str(tmp_path))


def test_a_stop_is_heard_while_another_agents_lock_is_waited_for(mailbox: Mailbox, tmp_path: Path) -> None:
    directory = tmp_path / "ck"
    directory.mkdir()
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM))
        timer.start()
        with pytest.raises(StoppedError, match="received SIGTERM"):
            JobLock(str(directory), tmp_path, run_id=None, pause=start(mailbox).pause)
        timer.join()
    assert time.monotonic() - began < 5.0
    JobLock(str(directory), tmp_path, run_id=None).close()  # and nothing is held any more


def test_other_signals_do_not_end_a_wait_nor_make_it_shorter(mailbox: Mailbox) -> None:
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGHUP)
    start(mailbox).pause(0.2)
    assert time.monotonic() - began >= 0.2
