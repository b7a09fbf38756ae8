"""Nodes with disks of their own: who lacks the newest state is sent it by who has it, and keeps a whole copy."""

from __future__ import annotations

import errno
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed as dist

from checkpoints import catalog, transfer
from checkpoints.errors import CheckpointError, CoordinationError, NoUsableCheckpointError
from checkpoints.manager import CheckpointManager
from checkpoints.storage import LocalStorage, Storage
from tests.checkpoints.support import FaultyStorage, assert_same, cut_state, fail_with, flip_byte, newest
from tests.support.ranks import KILLED, RankFailedError, run_ranks

Nodes = tuple[int, ...]  # of each rank


def node_directory(base: Path, nodes: Nodes, rank: int) -> Path:
    return base / f"node{nodes[rank]}"


def save(rank: int, world_size: int, store: dist.Store, base: Path, nodes: Nodes, steps: tuple[int, ...]) -> None:
    """A round of its own that goes on from the newest state and commits `steps`."""
    directory = node_directory(base, nodes, rank)
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, keep_last=9)
    manager.restore()
    for step in steps:
        manager.save(step, cut_state(step))
        result = manager.wait()
        assert result is not None
        assert result.state == "committed", result.error
    manager.close()


class DyingStorage(LocalStorage):
    """Reads of shards act once half of the file has been read: a disk that breaks, a process that dies."""

    def __init__(self, act: Callable[[], None], armed: Callable[[], bool] = lambda: True) -> None:
        self._act, self._armed = act, armed

    def open(self, path: str) -> IO[bytes]:
        if not path.endswith(".safetensors") or not self._armed():
            return super().open(path)
        return cast("IO[bytes]", _DyingFile(super().open(path), Path(path).stat().st_size // 2, self._act))


class _DyingFile:
    def __init__(self, file: Any, left: int, act: Callable[[], None]) -> None:
        self._file, self._left, self._act = file, left, act

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def readinto(self, target: memoryview) -> int:
        if self._left <= 0:
            self._act()
        count = self._file.readinto(target[: max(self._left, 1)])
        self._left -= count
        return int(count)

    def read(self, count: int) -> bytes:
        return bytes(self._file.read(count))


def sending() -> bool:
    return threading.current_thread().name == "checkpoint-send"


def storage_for(fault: str) -> Storage:
    if fault == "full disk":
        storage = FaultyStorage(fail_with(errno.ENOSPC), forever=True)
        storage.arm(1_000_000)
        return storage
    if fault == "dies while sending":
        return DyingStorage(lambda: os.kill(os.getpid(), signal.SIGKILL), sending)
    if fault == "read error while sending":
        return DyingStorage(fail_with(errno.EIO), sending)
    return LocalStorage()


def restore(
    rank: int,
    world_size: int,
    store: dist.Store,
    base: Path,
    nodes: Nodes,
    faults: dict[int, str],
    timeout_seconds: float = 20.0,
) -> tuple[int | None, str, list[str]]:
    """The step restored, verified; the path it came from; why newer ones were passed over. Or the error."""
    directory = node_directory(base, nodes, rank)
    storage = storage_for(faults.get(rank, ""))
    manager = CheckpointManager(
        directory,
        rank=rank,
        world_size=world_size,
        store=store,
        storage=storage,
        commit_timeout_seconds=timeout_seconds,
    )
    if isinstance(storage, FaultyStorage):
        storage.arm(8)  # rounds.json can be recorded, the shard not
    try:
        restored = manager.restore(cut_state(0))
    except (CoordinationError, NoUsableCheckpointError) as exc:
        return None, type(exc).__name__, [str(exc)]
    finally:
        manager.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("checkpoint-send")]
    if restored is None:
        return 0, "", []
    assert_same(restored.state, cut_state(restored.step))
    return restored.step, restored.path, [reason for _, reason in restored.skipped]


def assert_whole(directory: Path, step: int) -> None:
    """The step is committed there, and nothing half-written lies about."""
    states = {entry["step"]: (entry["state"], entry["reason"]) for entry in catalog.verify(directory)}
    assert states[step] == ("committed", None)
    assert not list(directory.glob(".writing-*"))


@pytest.mark.parametrize("newcomer", [0, 1, 2])
def test_newcomer_with_an_empty_disk_gets_the_newest_state_whichever_rank_it_is(tmp_path: Path, newcomer: int) -> None:
    run_ranks(2, save, tmp_path, (0, 1), (1, 2))
    (tmp_path / "node1").rename(tmp_path / "spare")
    nodes = [0, 0]
    nodes.insert(newcomer, 7)
    if newcomer != 1:
        (tmp_path / "spare").rename(tmp_path / "node1")
        nodes[2 if newcomer == 0 else 1] = 1
    results = run_ranks(3, restore, tmp_path, tuple(nodes), {})
    assert [(step, skipped) for step, _, skipped in results] == [(2, [])] * 3
    assert results[newcomer][1] == str(tmp_path / "node7" / "step-000000000002")
    assert_whole(tmp_path / "node7", 2)
    assert (tmp_path / "node7" / "rounds.json").exists()


def test_two_newcomers_with_two_ranks_each_are_sent_several_shards_and_keep_their_copies(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path, (0, 0), (1,))
    results = run_ranks(6, restore, tmp_path, (1, 1, 0, 0, 2, 2), {})
    assert [step for step, _, _ in results] == [1] * 6
    for node in (1, 2):
        assert_whole(tmp_path / f"node{node}", 1)
        assert len(list(newest(tmp_path / f"node{node}").glob("shard-*-of-00002*"))) == 2
    assert [step for step, _, _ in run_ranks(2, restore, tmp_path, (2, 2), {})] == [1, 1]


def test_node_that_was_away_gets_what_it_missed_and_learns_what_is_void(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path, (0, 1), (10, 20))
    for late in (tmp_path / "node0").glob("step-*20"):
        late.rename(tmp_path / "late")  # node 0 lost it: round 2, without node 1, goes on from step 10
    run_ranks(1, save, tmp_path, (0,), (15, 30))
    results = run_ranks(2, restore, tmp_path, (1, 0), {})
    assert [(step, skipped) for step, _, skipped in results] == [(30, [])] * 2
    assert_whole(tmp_path / "node1", 30)
    states = {entry["step"]: entry["state"] for entry in catalog.list_checkpoints(tmp_path / "node1")}
    assert states == {10: "committed", 20: "void", 30: "committed"}
    for received in (tmp_path / "node1").glob("step-*30/manifest.json"):
        received.unlink()
    alone = run_ranks(1, restore, tmp_path, (1,), {})
    assert alone[0][0] == 10  # step 20 stays void without the copy that told so


def test_step_of_a_line_that_was_left_is_set_aside_for_the_one_received(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path, (0, 1), (10, 20))
    next((tmp_path / "node0").glob("step-*20")).rename(tmp_path / "late")
    run_ranks(1, save, tmp_path, (0,), (20,))
    results = run_ranks(2, restore, tmp_path, (0, 1), {})
    assert [step for step, _, _ in results] == [20, 20]
    commits = {catalog.show(tmp_path / f"node{node}", 20)["commit"] for node in (0, 1)}
    assert len(commits) == 1
    assert len(list((tmp_path / "node1").glob(".void-step-000000000020-r1-*"))) == 1


def test_nobody_has_anything_is_a_fresh_start(tmp_path: Path) -> None:
    assert run_ranks(3, restore, tmp_path, (0, 1, 2), {}) == [(0, "", [])] * 3


@pytest.mark.parametrize("what", ["shard-*", "manifest.json"])
def test_damaged_copy_is_mended_from_a_peer(tmp_path: Path, what: str) -> None:
    run_ranks(2, save, tmp_path, (0, 1), (1, 2))
    flip_byte(next(newest(tmp_path / "node0").glob(what)), -5)
    results = run_ranks(2, restore, tmp_path, (0, 1), {})
    assert [(step, skipped) for step, _, skipped in results] == [(2, [])] * 2
    assert {(e["step"], e["state"]) for e in catalog.verify(tmp_path / "node0")} >= {(1, "committed"), (2, "committed")}
    assert len(list((tmp_path / "node0").glob(".void-step-000000000002-bad-*"))) == 1


def test_damaged_file_of_the_sender_is_found_out_and_another_sends(tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path, (0, 1, 2), (1, 2))
    flip_byte(next(newest(tmp_path / "node0").glob("shard-*")), -5)
    results = run_ranks(4, restore, tmp_path, (3, 0, 1, 2), {})
    assert [(step, skipped) for step, _, skipped in results] == [(2, [])] * 4
    for node in range(4):
        assert_whole(tmp_path / f"node{node}", 2)


def test_sender_that_fails_midway_gives_way_to_another(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path, (0, 1), (1, 2))
    results = run_ranks(3, restore, tmp_path, (0, 1, 2), {0: "read error while sending"})
    assert [(step, skipped) for step, _, skipped in results] == [(2, [])] * 3
    assert_whole(tmp_path / "node2", 2)


def test_state_whose_only_sender_fails_gives_way_to_an_older_one(tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path, (0, 1, 2), (1,))
    run_ranks(1, save, tmp_path, (0,), (2,))
    results = run_ranks(3, restore, tmp_path, (0, 1, 2), {0: "read error while sending"})
    assert [step for step, _, _ in results] == [1, 1, 1]
    assert "did not come from rank 0" in results[1][2][0]
    assert "Input/output error" in results[1][2][0]
    for node in (1, 2):
        assert_whole(tmp_path / f"node{node}", 1)
        assert len(list((tmp_path / f"node{node}").glob("step-*"))) == 1


@pytest.mark.parametrize("dying", [0, 1])
def test_death_of_the_only_sender_is_no_hang_and_leaves_no_half_checkpoint(tmp_path: Path, dying: int) -> None:
    run_ranks(2, save, tmp_path, (0, 1), (1,))
    run_ranks(1, save, tmp_path, (0,), (2,))
    nodes = (0, 1) if dying == 0 else (1, 0)
    began = time.monotonic()
    results = run_ranks(2, restore, tmp_path, nodes, {dying: "dies while sending"}, 6.0, may_die=True)
    assert time.monotonic() - began < 15
    assert results[dying] == KILLED
    assert results[1 - dying][:2] == (None, "CoordinationError")
    assert_whole(tmp_path / "node1", 1)
    assert len(list((tmp_path / "node1").glob("step-*"))) == 1
    assert run_ranks(1, restore, tmp_path, (1,), {})[0][0] == 1  # its round goes on with those that are left
    assert run_ranks(2, restore, tmp_path, (0, 1), {})[1][0] == 1  # and the dead node's step 2 is void from then on


@pytest.mark.parametrize("newcomer", [0, 1])
def test_full_disk_loads_what_it_is_sent_without_keeping_it(tmp_path: Path, newcomer: int) -> None:
    run_ranks(1, save, tmp_path, (0,), (1,))
    nodes = (1, 0) if newcomer == 0 else (0, 1)
    results = run_ranks(2, restore, tmp_path, nodes, {newcomer: "full disk"})
    assert [step for step, _, _ in results] == [1, 1]
    assert results[newcomer][1] == f"rank {1 - newcomer}"
    assert not list((tmp_path / "node1").glob("step-*"))


def restore_read_only(rank: int, world_size: int, store: dist.Store, base: Path) -> str:
    """As an unprivileged user; rank 1 and 2 share a directory that takes no files."""
    "localhost".encode("idna")  # a look-up of a name loads this codec, which the other user may not be able to read
    os.setuid(65534)
    directory = base / "own" if rank == 0 else base / "barred"
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, commit_timeout_seconds=20)
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert_same(restored.state, cut_state(3))
    return restored.path


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_read_only_directory_loads_what_it_is_sent() -> None:
    with tempfile.TemporaryDirectory() as name:  # the parents of tmp_path are closed to other users
        base = Path(name)
        base.chmod(0o755)
        run_ranks(1, save, base, (0,), (3,))
        (base / "node0").rename(base / "own")
        for path in [base / "own", *(base / "own").rglob("*")]:
            os.chown(path, 65534, 65534)
        (base / "barred").mkdir(mode=0o755)
        paths = run_ranks(3, restore_read_only, base)
    assert paths == [str(base / "own" / "step-000000000003"), "rank 0", "rank 0"]


def restore_mismatch(rank: int, world_size: int, store: dist.Store, base: Path) -> str:
    manager = CheckpointManager(base / f"node{rank}", rank=rank, world_size=world_size, store=store)
    try:
        manager.restore({"weights": torch.zeros(3)})
    except CheckpointError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        manager.close()
    return ""


def test_state_that_does_not_fit_is_the_same_error_on_the_rank_that_was_sent_it(tmp_path: Path) -> None:
    run_ranks(1, save, tmp_path, (0,), (1,))
    messages = run_ranks(2, restore_mismatch, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith("CheckpointMismatchError: the checkpoint of step 1 does not fit")


def restore_unreachable(rank: int, world_size: int, store: dist.Store, base: Path, unreachable: int) -> int:
    """One sender's address leads nowhere."""
    if rank == unreachable:
        original = transfer._listen

        def listen(host: str) -> socket.socket:
            listener = original(host)
            port = listener.getsockname()[1]
            listener.close()
            closed = socket.socket()
            closed.bind(("127.0.0.1", port))
            return closed  # bound and never listening: whoever connects is refused

        transfer._listen = listen
    manager = CheckpointManager(
        base / f"node{rank}", rank=rank, world_size=world_size, store=store, commit_timeout_seconds=20
    )
    restored = manager.restore()
    manager.close()
    return restored.step if restored is not None else 0


@pytest.mark.parametrize("sources", [1, 2])
def test_sender_out_of_reach_gives_way_to_another_or_to_an_error_that_says_so(tmp_path: Path, sources: int) -> None:
    run_ranks(sources, save, tmp_path, tuple(range(sources)), (1,))
    if sources == 2:
        assert run_ranks(3, restore_unreachable, tmp_path, 0) == [1, 1, 1]
        return
    with pytest.raises(RankFailedError, match=r"NoUsableCheckpointError.*did not come from rank 0: .*refused"):
        run_ranks(2, restore_unreachable, tmp_path, 0)


# The protocol alone.
