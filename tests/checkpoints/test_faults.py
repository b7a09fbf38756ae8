"""A commit that fails or dies at any of its storage operations leaves the old state or the new one, whole."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkpoints import catalog
from checkpoints.manager import CheckpointManager
from checkpoints.storage import LocalStorage
from tests.checkpoints.support import FaultyStorage, assert_same, cut_state, die, fail_with, small_state
from tests.support.ranks import KILLED, run_ranks

MOST_OPERATIONS = 60


def restore_and_check(directory: Path, allowed: dict[int, list[int]]) -> int:
    """Restore alone, check it is the state of one of the allowed seeds of its step, and that a save then works."""
    manager = CheckpointManager(directory)
    restored = manager.restore()
    assert restored is not None
    assert restored.state["extra"]["seed"] in allowed[restored.step], (restored.step, restored.skipped)
    assert_same(restored.state, small_state(restored.state["extra"]["seed"]))
    assert not list(directory.glob(".writing-*"))
    manager.save(restored.step + 1, small_state(99))
    result = manager.wait()
    manager.close()
    assert result is not None
    assert result.state == "committed", result.error
    assert {entry["state"] for entry in catalog.verify(directory)} <= {"committed", "void"}
    return restored.step


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
def test_commit_that_fails_at_any_operation_leaves_the_last_one_and_the_next_succeeds(
    tmp_path: Path, code: int, forever: bool
) -> None:
    storage = FaultyStorage(fail_with(code), forever)
    manager = CheckpointManager(tmp_path, storage=storage, keep_last=2)
    manager.restore()
    for step in (1, 2):
        manager.save(step, small_state(step))
    manager.wait()
    states = []
    for number in range(MOST_OPERATIONS):
        step = number + 3
        storage.arm(number)
        manager.save(step, small_state(step))
        result = manager.wait()
        assert result is not None
        states.append(result.state)
        survived = len(storage.operations) <= number
        storage.disarm()
        restored = manager.restore()
        assert restored is not None
        if result.state == "failed":
            assert os.strerror(code) in str(result.error)
            assert restored.step < step
        elif result.state == "committed":
            assert restored.step == step
        assert_same(restored.state, small_state(restored.step))
        assert not list(tmp_path.glob(".*"))
        if survived:
            break
    manager.close()
    assert survived
    assert states[:3] == ["failed"] * 3
    assert states[-1] == "committed"


def save_and_die(
    rank: int, world_size: int, store: dist.Store, base: Path, ranks: int, victim: int, first: int = 0
) -> Any:
    """Many small worlds of `ranks` ranks at once: world number n dies at operation n of its second commit."""
    number, rank = divmod(rank, ranks)
    number += first
    storage = FaultyStorage(die)
    store.set(f"up{number}/{rank}", "")
    store.wait([f"up{number}/{peer}" for peer in range(ranks)])
    manager = CheckpointManager(
        base / str(number),
        rank=rank,
        world_size=ranks,
        store=dist.PrefixStore(f"world{number}/", store),
        storage=storage,
        keep_last=2,
        commit_timeout_seconds=8,
    )
    manager.restore()
    manager.save(3, small_state(3))
    manager.wait()
    if rank == victim:
        storage.arm(number)
    manager.save(4, small_state(4))
    result = manager.wait()
    manager.close()
    return result.state if result is not None else None


def prepare(directory: Path) -> None:
    """States of steps 1 and 2."""
    manager = CheckpointManager(directory)
    manager.restore()
    for step in (1, 2):
        manager.save(step, small_state(step))
    manager.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_commit_killed_at_any_operation_leaves_the_old_or_the_new_state(tmp_path: Path, ranks: int) -> None:
    worlds, at_once = 12, 6
    for number in range(worlds):
        prepare(tmp_path / str(number))
    results = []
    for first in range(0, worlds, at_once):
        results += run_ranks(at_once * ranks, save_and_die, tmp_path, ranks, 0, first, may_die=True)
    killed = [result == KILLED for result in results[::ranks]]
    assert killed == sorted(killed, reverse=True)
    assert not killed[-1]
    assert ranks == 1 or set(results[1::2]) <= {"unknown", "committed"}
    reached = [restore_and_check(tmp_path / str(number), {3: [3], 4: [4]}) for number in range(worlds)]
    assert reached[0] == 3
    assert reached[-1] == 4
    assert reached == sorted(reached)


def test_rank_that_dies_in_a_commit_makes_it_fail_by_the_deadline(tmp_path: Path) -> None:
    worlds = 3
    for number in range(worlds):
        prepare(tmp_path / str(number))
    started = time.monotonic()
    results = run_ranks(worlds * 2, save_and_die, tmp_path, 2, 1, may_die=True)
    assert time.monotonic() - started < 30
    assert results[1::2] == [KILLED] * worlds
    assert results[::2] == ["failed"] * worlds
    for number in range(worlds):
        assert restore_and_check(tmp_path / str(number), {3: [3]}) == 3


def replace_and_die(rank: int, world_size: int, store: dist.Store, base: Path) -> Any:
    storage = FaultyStorage(die)
    manager = CheckpointManager(base / str(rank), storage=storage)
    restored = manager.restore()
    assert restored is not None
    storage.arm(rank)
    manager.save(restored.step, small_state(50))
    manager.wait()
    manager.close()
    return restored.step


def test_replacing_the_restored_step_is_atomic(tmp_path: Path) -> None:
    """A drain right after a start saves the very step that was restored, now of the new round."""
    worlds = 12
    for number in range(worlds):
        prepare(tmp_path / str(number))
    results = run_ranks(worlds, replace_and_die, tmp_path, may_die=True)
    assert results[0] == KILLED
    assert results[-1] == 2
    seeds = []
    for number in range(worlds):
        manager = CheckpointManager(tmp_path / str(number))
        restored = manager.restore()
        manager.close()
        assert restored is not None
        assert restored.step == 2
        seeds.append(restored.state["extra"]["seed"])
        assert_same(restored.state, small_state(seeds[-1]))
    assert seeds == sorted(seeds)
    assert (seeds[0], seeds[-1]) == (2, 50)


@pytest.mark.parametrize("can_swap", [True, False])
def test_replacing_a_step_that_fails_at_any_operation_leaves_the_old_or_the_new_one(
    tmp_path: Path, can_swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_swap:
        monkeypatch.setattr(LocalStorage, "swap", lambda self, first, second: False)
    states = []
    for number in range(MOST_OPERATIONS):
        directory = tmp_path / str(number)
        prepare(directory)
        storage = FaultyStorage(fail_with(errno.EIO))
        manager = CheckpointManager(directory, storage=storage)
        manager.restore()
        storage.arm(number)
        manager.save(2, small_state(50))
        result = manager.wait()
        storage.disarm()
        restored = manager.restore()
        manager.close()
        assert result is not None
        assert restored is not None
        states.append(result.state)
        expected = {"failed": 2, "committed": 50, "unknown": restored.state["extra"]["seed"]}[result.state]
        assert (restored.step, restored.state["extra"]["seed"]) == (2, expected), (number, storage.operations)
        assert not list(directory.glob(".writing-*"))
        if len(storage.operations) <= number:
            break
    assert (states[0], states[-1]) == ("failed", "committed")


def fail_everywhere(rank: int, world_size: int, store: dist.Store, directory: Path, victim: int) -> list[Any]:
    storage = FaultyStorage(fail_with(errno.ENOSPC))
    results: list[Any] = []
    manager = CheckpointManager(
        directory, rank=rank, world_size=world_size, store=store, storage=storage, commit_timeout_seconds=20,
        on_result=lambda r: results.append((r.state, r.error)),
    )  # fmt: skip
    manager.restore()
    manager.save(1, cut_state(1))
    manager.wait()
    for number in range(8):
        if rank == victim:
            storage.arm(number)
        manager.save(2 + number, cut_state(2 + number))
        manager.wait()
        storage.disarm()
        restored = manager.restore()
        assert restored is not None
        assert_same(restored.state, cut_state(restored.step))
        results[-1] = (*results[-1], restored.step == 2 + number)
    manager.save(100, cut_state(100))
    manager.close()
    return results


@pytest.mark.parametrize("victim", [0, 1])
def test_full_disk_of_one_rank_reaches_every_rank_and_the_next_save_works(tmp_path: Path, victim: int) -> None:
    first, second = run_ranks(2, fail_everywhere, tmp_path, victim)
    assert first == second
    failed = [result for result in first if result[0] == "failed"]
    assert len(failed) >= 3
    for _, error, restored_it in failed:
        assert f"rank {victim} could not" in error
        assert os.strerror(errno.ENOSPC) in error
        assert not restored_it
    assert all(result[2] for result in first[1:-1] if result[0] == "committed")
    assert first[-1][0] == "committed"


def test_restore_works_and_says_so_when_nothing_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(tmp_path)
    storage = FaultyStorage(fail_with(errno.EROFS), forever=True)
    storage.arm(0)
    manager = CheckpointManager(tmp_path, storage=storage)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == 2
    assert "could not be recorded" in caplog.text
    manager.save(3, small_state(3))
    result = manager.wait()
    assert result is not None
    assert result.state == "failed"
    storage.disarm()
    manager.save(4, small_state(4))
    result = manager.wait()
    manager.close()
    assert result is not None
    assert result.state == "committed"


def start_read_only(rank: int, world_size: int, store: dist.Store, directory: Path) -> list[Any]:
    storage = FaultyStorage(fail_with(errno.EROFS), forever=True)
    if rank == 1:
        storage.arm(0)
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, storage=storage)
    manager.restore()
    outcomes = []
    for step in range(1, 4):
        manager.save(step, cut_state(step))
        result = manager.wait()
        assert result is not None
        outcomes.append((result.state, result.error))
        if step == 1:
            storage.disarm()
    manager.close()
    return outcomes


def test_directory_that_is_read_only_at_start_is_found_out_again_at_the_next_save(tmp_path: Path) -> None:
    first, second = run_ranks(2, start_read_only, tmp_path)
    assert first == second
    assert first[0][0] == "failed"
    assert "rank 1 cannot write" in first[0][1]
    assert [state for state, _ in first[1:]] == ["committed", "committed"]


UNPRIVILEGED = """
import os, sys
import torch
from checkpoints.manager import CheckpointManager
os.setgid(65534); os.setuid(65534)
for directory, expected in ((sys.argv[1], "committed"), (sys.argv[2], "failed")):
    manager = CheckpointManager(directory)
    restored = manager.restore()
    manager.save(5, {"w": torch.ones(300_000)})
    result = manager.wait()
    assert result.state == expected, result
    manager.close()
assert restored.step == 2
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_unprivileged_user_saves_where_it_may_and_gets_a_failed_result_where_not() -> None:
    base = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        base.chmod(0o755)
        (base / "own").mkdir()
        os.chown(base / "own", 65534, 65534)
        prepare(base / "others")
        for path in (base / "others").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (base / "others").chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, str(base / "own"), str(base / "others")],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (file,) = (base / "own").glob("step-*/shard-*")
        assert file.stat().st_mode & 0o777 == 0o640
    finally:
        shutil.rmtree(base)
