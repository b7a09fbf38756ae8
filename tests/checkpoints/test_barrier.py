"""The barrier of a commit when the store or a peer fails: every rank hears something by its deadline, and goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

import tests.support.ranks  # noqa: F401 - its forkserver has torch imported already
from checkpoints.background import CommitResult
from checkpoints.errors import CoordinationError
from checkpoints.manager import CheckpointManager
from tests.checkpoints.support import FaultyStorage, cut_state

TIMEOUT_SECONDS = 2.0
NO_HANG_SECONDS = 15.0  # less than what would be waited without the deadline, more than what a slow machine takes


def serve(connection: Connection) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(server.port)
    time.sleep(120)


class Server:
    """A store server in a process of its own, to be killed or frozen."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.port = int(ours.recv())
        ours.close()
        self.pid = self.process.pid or 0

    def client(self) -> dist.Store:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=30))

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class Pair:
    """Two ranks as two threads of this process; rank 1's shard waits to be let through."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.blocked, self.let = threading.Event(), threading.Event()
        self.storage = FaultyStorage(self._block)
        self._pool = ThreadPoolExecutor(2)
        self.managers = list(self._pool.map(lambda rank: self._open(server, directory, rank), (0, 1)))

    def _block(self) -> None:
        self.blocked.set()
        self.let.wait(60)

    def _open(self, server: Server, directory: Path, rank: int) -> CheckpointManager:
        return CheckpointManager(
            directory,
            rank=rank,
            world_size=2,
            store=server.client(),
            storage=self.storage if rank == 1 else None,
            commit_timeout_seconds=TIMEOUT_SECONDS,
        )

    def save_blocked(self, step: int) -> float:
        """Begin a commit on both, and return when rank 1 hangs in the middle of its write."""
        started = time.monotonic()
        self.storage.arm(1)
        for manager in self.managers:
            manager.save(step, cut_state(step))
        assert self.blocked.wait(10)
        return started

    def results(self) -> list[CommitResult | None]:
        return list(self._pool.map(lambda manager: manager.wait(), self.managers))

    def close(self) -> None:
        self.let.set()
        list(self._pool.map(lambda manager: manager.close(), self.managers))
        self._pool.shutdown()


def test_server_that_dies_in_a_commit_ends_it_at_once_on_every_rank(server: Server, tmp_path: Path) -> None:
    pair = Pair(server, tmp_path)
    started = pair.save_blocked(1)
    server.process.kill()
    pair.let.set()
    first, second = pair.results()
    assert time.monotonic() - started < NO_HANG_SECONDS
    assert first is not None
    assert second is not None
    assert first.state == "failed"
    assert second.state in ("failed", "unknown")
    assert not list(tmp_path.glob("step-*"))
    pair.close()


def test_frozen_server_obeys_no_timeout_but_the_deadline_holds(server: Server, tmp_path: Path) -> None:
    pair = Pair(server, tmp_path)
    started = pair.save_blocked(1)
    os.kill(server.pid, signal.SIGSTOP)
    pair.let.set()
    first, second = pair.results()
    assert time.monotonic() - started < NO_HANG_SECONDS
    assert first is not None
    assert second is not None
    assert first.state == "failed"
    assert second.state == "unknown"
    assert "store" in str(second.error)
    os.kill(server.pid, signal.SIGCONT)
    pair.managers[0].save(2, cut_state(2))
    pair.managers[1].save(2, cut_state(2))
    assert [result and result.state for result in pair.results()] == ["committed", "committed"]
    pair.close()


def test_rank_that_hangs_in_its_file_system_does_not_hang_the_others(server: Server, tmp_path: Path) -> None:
    pair = Pair(server, tmp_path)
    started = pair.save_blocked(1)
    first = pair.managers[0].wait()
    assert time.monotonic() - started < NO_HANG_SECONDS
    assert first is not None
    assert first.state == "failed"
    assert "rank/1 did not come" in str(first.error)
    waited = pair.managers[1].wait(0.1)
    assert waited is not None
    assert waited.state == "unknown"
    assert "still in flight" in str(waited.error)
    pair.let.set()
    _, second = pair.results()
    assert second is not None
    assert second.state == "failed"
    for manager in pair.managers:
        manager.save(2, cut_state(2))
    assert [result and result.state for result in pair.results()] == ["committed", "committed"]
    assert not list(tmp_path.glob(".writing-*"))
    pair.close()


def test_restore_that_a_rank_does_not_join_raises_by_its_deadline(server: Server, tmp_path: Path) -> None:
    pair = Pair(server, tmp_path)
    started = time.monotonic()
    with pytest.raises(CoordinationError, match="offer/1 did not come"):
        pair.managers[0].restore()
    assert time.monotonic() - started < NO_HANG_SECONDS
    pair.close()


def test_manager_whose_peer_never_comes_raises_by_its_deadline(server: Server, tmp_path: Path) -> None:
    with pytest.raises(CoordinationError, match="start/rank/1 did not come"):
        CheckpointManager(tmp_path, world_size=2, store=server.client(), commit_timeout_seconds=0.5)


def test_training_may_use_the_store_while_a_commit_waits(server: Server, tmp_path: Path) -> None:
    """One store client is one lock: a commit that waits on the caller's own client would block it."""
    pair = Pair(server, tmp_path)
    pair.save_blocked(1)
    client = server.client()
    for number in range(50):
        client.set(f"training/{number}", "x")
        client.get(f"training/{number}")
    assert pair.managers[0].busy, "none of this has waited for the commit to end"
    pair.let.set()
    assert [result and result.state for result in pair.results()] == ["committed", "committed"]
    pair.close()
