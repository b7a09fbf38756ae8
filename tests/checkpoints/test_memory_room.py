"""The memory tier where there is little room: what does not fit is said, and used again once it does."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from checkpoints.held import held_in
from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier
from tests.checkpoints.support import (
    assert_same,
    cut_state,
    loaded,
    manager_of,
    mark,
    restored_by,
    slots_by_step,
    small_state,
)


def test_too_little_memory_is_said_once_with_sizes_and_saves_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    tier = MemoryTier(tmp_path / "shm", on_failure=heard.append)
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _with_free(real(path), 1_000_000))
    manager = CheckpointManager(tmp_path / "disk", memory=tier)
    manager.restore()
    for step in range(1, 4):
        assert manager.keep(step, cut_state(step)) is None
    manager.save(4, cut_state(4))
    result = manager.wait()
    assert result is not None
    assert result.state == "committed"
    manager.close()
    assert len(heard) == caplog.text.count("checkpoints in memory are off") == 1
    assert "needs 2 MB" in heard[0]
    assert "1 MB can be had" in heard[0]
    assert not list((tmp_path / "shm").glob("rank-*"))


def test_room_that_a_restore_has_taken_for_what_peers_sent_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's first rank removes it while its neighbours find out how much they may use."""
    heard: list[str] = []
    tier = MemoryTier(tmp_path, local_rank=1, local_world_size=2, on_failure=heard.append)
    received = Path(tier.inbox("x"))
    received.mkdir()
    (received / "shard").write_bytes(bytes(7_500_000))
    real, fallocate = os.statvfs, os.posix_fallocate
    monkeypatch.setattr(os, "statvfs", lambda path: _with_free(real(path), 500_000 if received.exists() else 8_000_000))
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: _refuse() if received.exists() else fallocate(*a))
    tier._fit(1_700_000, 2)  # of two ranks, twice each: it is going to be free
    tier.expect(1_000_000, lend=False)  # and is waited for
    removal = threading.Timer(0.1, shutil.rmtree, (received,))
    removal.start()
    tier.settle()
    assert tier.keep(cut_state(1), mark(1), reading=False) is not None
    tier.close()
    removal.join()
    assert heard == []


def test_files_that_come_and_go_in_the_folder_are_no_reason_to_keep_nothing(tmp_path: Path) -> None:
    """A neighbour's file may be gone between its name and its size."""
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for number in range(30):
                (tmp_path / f"received-{number % 3}").mkdir(exist_ok=True)
                (tmp_path / f"received-{number % 3}" / f"{number}").touch()
                (tmp_path / f"rounds.{number}").touch()
            for number in range(30):
                (tmp_path / f"rounds.{number}").unlink()
            for number in range(3):
                shutil.rmtree(tmp_path / f"received-{number}")

    neighbour = threading.Thread(target=churn)
    neighbour.start()
    try:
        tier = MemoryTier(tmp_path)
        for _ in range(300):
            tier._fit(1000, 3)
    finally:
        done.set()
        neighbour.join()
    assert (tier._count, tier.problem) == (3, None)
    tier.close()


def test_memory_that_is_full_for_a_moment_is_used_again_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    manager = manager_of(None, tmp_path)
    manager.restore()
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", lambda *_: _refuse())
        assert manager.keep(1, cut_state(1)) is None
        assert manager.keep(2, cut_state(2)) is None
    assert manager.keep(3, cut_state(3)) is None, "not at each step"
    manager._memory._retry_at = 0.0  # type: ignore[union-attr]
    assert manager.keep(4, cut_state(4)) is not None
    manager.close()
    assert caplog.text.count("checkpoints in memory are off") == 1
    assert "on again with step 4" in caplog.text
    manager = manager_of(None, tmp_path)
    assert restored_by(manager).step == 4
    manager.close()


def test_memory_that_has_become_less_is_used_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three copies seem to fit, and others take the room of the third one."""
    monkeypatch.setattr("checkpoints.memory._RETRY_SECONDS", 0.0)
    fallocate, statvfs = os.posix_fallocate, os.statvfs

    def no_third(descriptor: int, start: int, size: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.endswith("slot-2"):
            _refuse()
        fallocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", no_third)
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    assert [manager.keep(step, cut_state(step)) is None for step in (1, 2, 3)] == [False, False, True]
    monkeypatch.setattr(os, "statvfs", lambda path: _with_free(statvfs(path), 1_000_000))
    assert all(manager.keep(step, cut_state(step)) is not None for step in range(4, 9))
    manager.close()
    assert "are off" in caplog.text


def _refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _with_free(status: os.statvfs_result, free_bytes: int) -> os.statvfs_result:
    fields = list(status)
    fields[4] = free_bytes // status.f_frsize
    return os.statvfs_result(fields)


def test_two_slots_where_three_do_not_fit_and_the_commit_has_a_copy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _with_free(real(path), 2_800_000))
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    for step in range(1, 6):
        assert manager.save(step, cut_state(step))
        manager.wait()
    manager.close()
    assert len(list((tmp_path / "node0").glob("rank-0-slot-*"))) == 2
    assert sorted(slots_by_step(tmp_path / "node0")) == [4, 5]


def test_memory_that_is_taken_by_others_in_between_is_no_death_by_sigbus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: _refuse())
    assert manager.keep(1, cut_state(1)) is None
    assert "No space left" in caplog.text
    manager.close()


def test_state_that_grows_and_changes_its_form_is_kept_all_the_same(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    for step, state in enumerate([small_state(1), cut_state(2), {"w": torch.zeros(3)}, small_state(4)], start=1):
        manager.keep(step, state)
        manager.settle()
        newest = max(held_in(tmp_path / "node0", ""), key=lambda whole: whole.mark.step)
        assert_same(loaded(newest), state)
    manager.close()
