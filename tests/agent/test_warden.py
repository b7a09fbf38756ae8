"""The warden alone: it kills on a closed pipe and on a passed deadline, and leaves on a bye."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.warden import Warden, boottime, is_alive, kill_everything
from tests.support.job import wait_for


@pytest.fixture
def nonce() -> str:
    return secrets.token_hex(16)


@pytest.fixture
def worker(nonce: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = {**os.environ, "ELASTICD_NONCE": nonce}
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=environ, start_new_session=True
    )
    wait_for(lambda: nonce.encode() in Path(f"/proc/{process.pid}/environ").read_bytes())
    yield process
    process.kill()
    process.wait()


def test_it_leaves_the_workers_alone_after_a_bye(nonce: str, worker: subprocess.Popen[bytes]) -> None:
    warden = Warden(nonce)
    warden.groups([worker.pid])
    warden.close()
    assert worker.poll() is None


def test_a_passed_deadline_kills_but_does_not_end_it(nonce: str, worker: subprocess.Popen[bytes]) -> None:
    warden = Warden(nonce)
    try:
        warden.allow_until(boottime() + 0.3)
        began = time.monotonic()
        wait_for(lambda: worker.poll() is not None, seconds=10)
        assert time.monotonic() - began >= 0.25
        assert is_alive(warden.pid)
    finally:
        warden.close()


def test_a_deadline_that_is_moved_on_does_not_kill(nonce: str, worker: subprocess.Popen[bytes]) -> None:
    warden = Warden(nonce)
    try:
        first = boottime() + 0.5
        warden.allow_until(first)
        warden.allow_until(first + 60)
        wait_for(lambda: boottime() > first + 0.5)
        assert worker.poll() is None
    finally:
        warden.close()


def test_a_descriptor_it_was_handed_stays_open_as_long_as_it_lives(nonce: str) -> None:
    reading, writing = os.pipe()
    warden = Warden(nonce, keep_open=(writing,))
    os.close(writing)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    warden.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_only_what_carries_the_nonce_or_is_named_is_killed(nonce: str, worker: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        assert kill_everything(nonce, [], deadline=time.monotonic() + 10)
        assert worker.wait(5) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
