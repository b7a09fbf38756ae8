"""The end of a process as a descriptor: as Python gives it, past an interpreter without it, on a kernel without it."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic import pidfd
from tests.support.job import wait_for


@pytest.fixture(params=["python", "syscall", "thread"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What there is here to tell the end of a process by."""
    if request.param != "python":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    if request.param == "thread":

        def refused(*_: Any) -> int:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(pidfd, "_syscall", refused)
    return str(request.param)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_the_end_of_a_child_is_seen_and_its_exit_code_is_left(way: str, child: subprocess.Popen[bytes]) -> None:
    end = pidfd.end_of_child(child.pid)
    try:
        assert not os.get_inheritable(end)
        assert not is_readable(end)
        child.terminate()
        wait_for(lambda: is_readable(end), seconds=10)
        assert child.wait(10) == -signal.SIGTERM
    finally:
        os.close(end)
    assert (way == "thread") == (pidfd.open_pidfd(os.getpid()) is None)
    wait_for(lambda: not any(thread.name.startswith("end-of-") for thread in threading.enumerate()), seconds=10)


def test_a_child_that_has_ended_before_is_seen_as_well(way: str, child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    end = pidfd.end_of_child(child.pid)
    wait_for(lambda: is_readable(end), seconds=10)
    os.close(end)


@pytest.mark.parametrize("way", ["python", "syscall"], indirect=True)
def test_a_signal_goes_to_the_process_that_was_meant(way: str, child: subprocess.Popen[bytes]) -> None:
    opened = pidfd.open_pidfd(child.pid)
    assert opened is not None
    pidfd.send_signal(opened, signal.SIGUSR1)
    assert child.wait(10) == -signal.SIGUSR1
    with pytest.raises(ProcessLookupError):
        pidfd.send_signal(opened, signal.SIGUSR1)
    os.close(opened)


@pytest.mark.parametrize("way", ["python", "syscall"], indirect=True)
def test_a_process_that_is_not_there_is_named_so(way: str, child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(10)
    with pytest.raises(ProcessLookupError):
        pidfd.open_pidfd(child.pid)
