"""The memory tier: what is kept is whole at any instant, comes back bit by bit, and is not taken when damaged."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import CheckpointError, UnsupportedStateError
from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier, Sealed
from checkpoints.slot import read_slot
from tests.checkpoints.support import (
    assert_same,
    cut_state,
    flip_byte,
    manager_of,
    mark,
    restored_by,
    slots_by_step,
    small_state,
)
from tests.support.job import wait_for
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_what_was_kept_comes_back_bit_by_bit_and_is_newer_than_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """Also where the kernel's pages are of 64 KiB (some of aarch64): a mapping begins at such a boundary alone."""
    monkeypatch.setattr("checkpoints.slot._GRAIN_BYTES", page_bytes)
    for number, state in enumerate([small_state(1), cut_state(2)]):
        disk, folder = tmp_path / f"disk{number}", tmp_path / f"shm{number}"
        manager = manager_of(disk, folder)
        assert manager.restore() is None
        manager.save(1, state)
        for step in range(2, 6):
            assert manager.keep(step, cut_state(step)) is not None
        manager.keep(6, state, samples=48, fingerprint="data")
        manager.close()
        manager = manager_of(disk, folder)
        restored = restored_by(manager, fingerprint="data", like=state)
        assert (restored.step, restored.tier, restored.samples, restored.base_step) == (6, "memory", 48, 0)
        assert restored.disk_step == 1
        assert_same(restored.state, state)
        assert manager.round == 2
        shares = [read_slot(path) for path in (folder / "node0").glob("rank-0-slot-*")]
        assert not any(share.image_start % page_bytes for share in shares if share is not None)
        manager.close()


def keep_some(rank: int, world: int, store: Any, disk: Path | None, folder: Path, nodes: int, steps: int) -> Any:
    manager = manager_of(disk, folder, rank=rank, world=world, store=store, nodes=nodes)
    restored = manager.restore()
    began = 0 if restored is None else restored.step
    if restored is not None:
        assert_same(restored.state, cut_state(began))
    for step in range(began + 1, began + steps + 1):
        manager.keep(step, cut_state(step))
    manager.close()
    return began, restored and restored.tier


@pytest.mark.parametrize("nodes", [1, 3])
def test_ranks_share_out_the_state_within_their_node_and_restore_it_at_another_world_size(
    tmp_path: Path, nodes: int
) -> None:
    run_ranks(3, keep_some, tmp_path / "disk", tmp_path / "shm", nodes, 4)
    assert run_ranks(2, keep_some, tmp_path / "disk", tmp_path / "shm", 1, 0) == [(4, "memory")] * 2


def test_memory_alone_serves_without_a_directory_and_remembers_its_rounds(tmp_path: Path) -> None:
    assert run_ranks(2, keep_some, None, tmp_path, 2, 3) == [(0, None)] * 2
    assert run_ranks(2, keep_some, None, tmp_path, 2, 3) == [(3, "memory")] * 2
    manager = manager_of(None, tmp_path)
    assert manager.round == 3
    with pytest.raises(CheckpointError, match="no directory to save to"):
        manager.save(1, small_state(1))
    manager.close()
    with pytest.raises(CheckpointError, match="directory is None and memory as well"):
        CheckpointManager(None)


@pytest.mark.parametrize("lost", [(0,), (0, 1), (1, 2)])
def test_nodes_that_come_empty_are_sent_what_one_survivor_holds(tmp_path: Path, lost: tuple[int, ...]) -> None:
    run_ranks(3, keep_some, tmp_path / "disk", tmp_path / "shm", 3, 5)
    for node in lost:
        for path in (tmp_path / "shm" / f"node{node}").iterdir():
            path.unlink()
    assert run_ranks(3, keep_some, tmp_path / "disk", tmp_path / "shm", 3, 1) == [(5, "memory")] * 3
    assert not list((tmp_path / "shm").glob("*/received-*"))


def test_node_of_two_ranks_takes_what_it_is_sent_once_and_both_read_it(tmp_path: Path) -> None:
    run_ranks(4, keep_some, tmp_path / "disk", tmp_path / "shm", 2, 2)
    for path in (tmp_path / "shm" / "node1").iterdir():
        path.unlink()
    assert run_ranks(4, keep_some, tmp_path / "disk", tmp_path / "shm", 2, 1) == [(2, "memory")] * 4


def image_end(path: Path) -> int:
    share = read_slot(path)
    assert share is not None
    return share.image_start + share.image_bytes


def flip_image(path: Path) -> None:
    flip_byte(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("steps_damaged", "expected"), [((), (6, "memory")), ((6,), (5, "memory")), ((5, 6), (3, "disk"))]
)
@pytest.mark.parametrize("position", ["head", "text", "image", "end"])
def test_damaged_memory_is_passed_over_for_the_next_older_state(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    steps_damaged: tuple[int, ...],
    expected: tuple[int, str],
    position: str,
) -> None:
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    manager.save(3, cut_state(3))
    manager.wait()
    for step in (5, 6):
        manager.keep(step, cut_state(step))
    manager.close()
    slots = slots_by_step(tmp_path / "node0")
    for step in (3, *steps_damaged):  # what the disk has as well lies in memory too
        if steps_damaged and position == "end":
            os.truncate(slots[step], image_end(slots[step]) - 100)
        elif steps_damaged:
            flip_byte(slots[step], {"head": 20, "text": 4200, "image": slots[step].stat().st_size // 2}[position])
    manager = manager_of(tmp_path / "disk", tmp_path)
    restored = restored_by(manager)
    assert (restored.step, restored.tier) == expected
    assert_same(restored.state, cut_state(restored.step))
    assert "passed over" in caplog.text if steps_damaged else "passed over" not in caplog.text
    manager.close()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_of_ours_is_neither_waited_for_nor_followed_and_is_replaced(tmp_path: Path, kind: str) -> None:
    manager = manager_of(None, tmp_path)
    manager.restore()
    for step in (1, 2):
        manager.keep(step, cut_state(step))
    manager.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    slot = slots_by_step(tmp_path / "node0")[2]
    slot.unlink()
    os.mkfifo(slot) if kind == "pipe" else slot.symlink_to(elsewhere)
    manager = manager_of(None, tmp_path)
    assert restored_by(manager).step == 1
    for step in (2, 3, 4):
        assert manager.keep(step, cut_state(step)) is not None
        manager.settle()
    manager.close()
    assert slot.is_file()
    assert not slot.is_symlink()
    assert elsewhere.read_bytes() == b"not ours"


def test_damage_on_one_node_is_mended_by_another(tmp_path: Path) -> None:
    run_ranks(2, keep_some, tmp_path / "disk", tmp_path / "shm", 2, 3)
    flip_image(slots_by_step(tmp_path / "shm" / "node0")[3])
    assert run_ranks(2, keep_some, tmp_path / "disk", tmp_path / "shm", 2, 1) == [(3, "memory")] * 2


def test_memory_that_was_all_there_is_and_is_damaged_is_no_reason_to_refuse_a_start(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    manager.keep(1, cut_state(1))
    manager.close()
    flip_image(slots_by_step(tmp_path / "node0")[1])
    manager = manager_of(tmp_path / "disk", tmp_path)
    assert manager.restore() is None
    manager.close()


def test_state_that_a_later_round_left_behind_is_void_in_memory_too(tmp_path: Path) -> None:
    """A node that was away holds step 9 of round 1; round 2 went on from the disk's step 4."""
    first = manager_of(tmp_path / "disk", tmp_path / "away")
    first.restore()
    first.save(4, cut_state(4))
    first.wait()
    first.keep(9, cut_state(9))
    first.close()
    second = manager_of(tmp_path / "disk", tmp_path / "here")
    assert restored_by(second).step == 4
    second.close()
    third = manager_of(tmp_path / "disk", tmp_path / "away")
    restored = restored_by(third)
    assert (restored.step, restored.tier) == (4, "memory")
    ((place, reason),) = restored.skipped
    assert place == "step-000000000009 in memory"
    assert "void: round 2 started from step 4" in reason
    third.close()


def test_a_directory_that_cannot_be_read_is_no_hindrance_while_memory_holds_a_state(tmp_path: Path) -> None:
    disk, elsewhere, folder = tmp_path / "disk", tmp_path / "elsewhere", tmp_path / "shm"
    first = manager_of(disk, folder, round=1)
    first.restore()
    first.save(4, cut_state(4))
    first.wait()
    first.keep(9, cut_state(9))
    first.close()
    disk.rename(elsewhere)
    disk.write_text("as a file server that is gone: no directory")
    second = manager_of(disk, folder, round=2)
    assert (restored_by(second).step, second.round) == (9, 2)
    second.save(10, cut_state(10))
    result = second.wait()
    assert result is not None
    assert result.state == "failed"
    second.close()
    for path in folder.glob("node0/*"):
        if path.is_file():
            path.write_bytes(b"")
    third = manager_of(disk, folder, round=3)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint directory"):
        third.restore()
    third.close()
    disk.unlink()
    elsewhere.rename(disk)
    fourth = manager_of(disk, folder, round=4)
    assert restored_by(fourth).step == 4
    fourth.close()


def test_round_from_a_step_above_the_disk_that_loses_its_memory_goes_back_to_the_disk(tmp_path: Path) -> None:
    for folder, step in (("a", 0), ("a", 6), ("b", 4)):  # the third round finds other memory: the node is gone
        manager = manager_of(tmp_path / "disk", tmp_path / folder)
        restored = manager.restore()
        assert (restored.step if restored else 0) == step
        if not step:
            manager.save(4, cut_state(4))
            manager.wait()
        manager.keep(step + 6, cut_state(step + 6))
        manager.close()


def test_commit_reads_the_copy_in_memory_while_steps_go_on_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(tmp_path / "disk", tmp_path)
    manager.restore()
    for step in range(1, 4):
        manager.keep(step, cut_state(step))
    gate, write = threading.Event(), manager._storage.write
    monkeypatch.setattr(manager._storage, "write", lambda *args: (gate.wait(20), write(*args)))
    manager.save(4, cut_state(4))
    with pytest.raises(ValueError, match="nothing is staged"):
        manager._stager.buffer.view(1)  # copied once
    for step in range(5, 15):
        manager.keep(step, cut_state(step))
    # Sealed beside the steps.
    wait_for(lambda: sorted(slots_by_step(tmp_path / "node0"))[-2:] == [13, 14], seconds=10.0)
    gate.set()
    result = manager.wait()
    assert result is not None
    assert result.state == "committed"
    manager.keep(15, cut_state(15))
    manager.close()
    alone = CheckpointManager(tmp_path / "disk")
    restored = restored_by(alone)
    assert restored.step == 4
    assert_same(restored.state, cut_state(4))
    alone.close()


def test_keep_before_restore_and_what_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "disk", tmp_path)
    with pytest.raises(CheckpointError, match="call restore"):
        manager.keep(1, small_state(1))
    manager.restore()
    manager.keep(1, small_state(1))
    with pytest.raises(UnsupportedStateError, match=r"state\['odd'\]"):
        manager.keep(2, {"odd": object()})
    manager.close()
    assert sorted(slots_by_step(tmp_path / "node0")) == [1]


def test_sealed_is_told_with_its_size(tmp_path: Path) -> None:
    heard: list[Sealed] = []
    tier = MemoryTier(tmp_path, on_sealed=heard.append)
    tier.keep(cut_state(1), mark(5), reading=False)
    tier.settle()
    assert [each.step for each in heard] == [5]
    assert heard[0].bytes > 700_000
    assert heard[0].seal_seconds > 0
    tier.close()


def test_local_rank_outside_its_world_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="local_rank is 2 and local_world_size 2"):
        MemoryTier(tmp_path, local_rank=2, local_world_size=2)
