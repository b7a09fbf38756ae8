"""Restore passes over what is damaged, says so, and refuses to start from zero when nothing is left."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoints import catalog
from checkpoints.errors import NoUsableCheckpointError
from checkpoints.manager import CheckpointManager
from tests.checkpoints.support import assert_same, cut_state, flip_byte, newest
from tests.support.ranks import run_ranks


def save_steps(directory: Path, *steps: int) -> None:
    manager = CheckpointManager(directory, keep_last=10)
    manager.restore()
    for step in steps:
        manager.save(step, cut_state(step))
    manager.close()


def shard(directory: Path) -> Path:
    return next(newest(directory).glob("shard-*"))


def truncate(directory: Path) -> None:
    data = shard(directory).read_bytes()
    shard(directory).write_bytes(data[:-1])


def foreign(directory: Path) -> None:
    older = min(directory.glob("step-*"))
    shutil.copy(next(older.glob("shard-*")), shard(directory))


def edit_manifest(directory: Path) -> None:
    path = newest(directory) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "samples": 10**6}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard truncated": (truncate, "bytes instead of"),
    "shard emptied": (lambda d: shard(d).write_bytes(b""), "has 0 bytes"),
    "shard missing": (lambda d: shard(d).unlink(), "is missing"),
    "data bit-flipped": (lambda d: flip_byte(shard(d), -5), "checksum"),
    "header bit-flipped": (lambda d: flip_byte(shard(d), 40), "not the shard|not JSON|checksum"),
    "header length bit-flipped": (lambda d: flip_byte(shard(d), 6), "claims"),
    "padding bit-flipped": (lambda d: flip_byte(shard(d), 4000), "checksum|not JSON"),
    "foreign shard": (foreign, "checksum"),
    "manifest missing": (lambda d: (newest(d) / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest truncated": (
        lambda d: (newest(d) / "manifest.json").write_bytes((newest(d) / "manifest.json").read_bytes()[:-20]),
        "not JSON",
    ),
    "manifest not JSON": (lambda d: (newest(d) / "manifest.json").write_bytes(b"\x80\x04pickle"), "not JSON"),
    "manifest not an object": (lambda d: (newest(d) / "manifest.json").write_bytes(b"[1]"), "not a JSON object"),
    "manifest edited": (edit_manifest, "does not match its own checksum"),
    "directory renamed": (lambda d: newest(d).rename(d / "step-000000000099"), "manifest is that of step 3"),
    "directory is a file": (
        lambda d: (newest(d).rename(d / "gone"), (d / "step-000000000003").write_bytes(b"")),
        "manifest.json is missing",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_gives_way_to_the_one_before_and_says_why(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage, reason = DAMAGE[kind]
    damage(tmp_path)
    damaged = newest(tmp_path)
    manager = CheckpointManager(tmp_path)
    with caplog.at_level(logging.WARNING):
        restored = manager.restore(cut_state(0))
    assert restored is not None
    assert restored.step == 2
    assert_same(restored.state, cut_state(2))
    ((path, why),) = restored.skipped
    assert path == str(damaged)
    assert any(part in why for part in reason.split("|")), why
    assert str(damaged) in caplog.text
    manager.save(3, cut_state(33))
    result = manager.wait()
    assert result is not None
    assert result.state == "committed", result.error
    again = manager.restore()
    manager.close()
    assert again is not None
    assert_same(again.state, cut_state(33))


def test_damaged_state_in_the_way_of_a_commit_is_set_aside_not_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    flip_byte(shard(tmp_path), -1)
    save_steps(tmp_path, 2, 3, 4, 5, 6)
    (aside,) = tmp_path.glob(".void-*")
    assert aside.name.startswith(".void-step-000000000002-bad-")
    states = {(entry["step"], entry["state"]) for entry in catalog.verify(tmp_path)}
    assert states == {(1, "committed"), (2, "corrupt"), *((step, "committed") for step in range(2, 7))}


def test_all_damaged_is_an_error_that_lists_each_and_fresh_start_must_be_asked_for(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for path in tmp_path.glob("step-*/shard-*"):
        flip_byte(path, -1)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(NoUsableCheckpointError, match=r"step-0+2: .*checksum.*step-0+1: .*checksum.*allow-fresh-start"):
        manager.restore()
    assert manager.restore(allow_fresh_start=True) is None
    manager.close()


def test_retention_never_removes_what_does_not_verify(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (newest(tmp_path) / "manifest.json").write_bytes(b"{")
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert manager.restore(allow_fresh_start=True) is None
    for step in (2, 3, 4):
        manager.save(step, cut_state(step))
    manager.close()
    assert [(e["step"], e["state"]) for e in catalog.list_checkpoints(tmp_path)] == [(1, "corrupt"), (4, "committed")]


def test_state_of_an_old_round_that_comes_late_is_void(tmp_path: Path) -> None:
    """A machine was paused in the middle of a commit of round 1; round 2 went on from below; now it thaws."""
    save_steps(tmp_path, 10, 40)
    late = tmp_path / "late"
    newest(tmp_path).rename(late)
    second = CheckpointManager(tmp_path, keep_last=10)
    restored = second.restore()
    assert restored is not None
    assert restored.step == 10
    second.save(20, cut_state(20))
    second.wait()
    late.rename(tmp_path / "step-000000000040")
    listed = {entry["step"]: entry["state"] for entry in catalog.list_checkpoints(tmp_path)}
    assert listed == {10: "committed", 20: "committed", 40: "void"}

    second.save(40, cut_state(41))  # the step is taken by the void one
    result = second.wait()
    second.close()
    assert result is not None
    assert result.state == "committed"
    third = CheckpointManager(tmp_path)
    restored = third.restore()
    third.close()
    assert restored is not None
    assert (restored.step, restored.round) == (40, 2)
    assert_same(restored.state, cut_state(41))


def test_a_round_that_another_one_has_gone_on_from_commits_no_more(tmp_path: Path) -> None:
    """Two jobs with one directory: what the first saved would be void, and it is told so."""
    first = CheckpointManager(tmp_path, run_id="one")
    first.restore()
    first.save(10, cut_state(10))
    first.wait()
    second = CheckpointManager(tmp_path, run_id="two")
    restored = second.restore()
    assert restored is not None
    first.save(20, cut_state(20))
    result = first.wait()
    assert result is not None
    assert result.state == "failed"
    assert result.error is not None
    assert "round 2 has begun in" in result.error
    second.save(15, cut_state(15))
    second.close()
    first.close()
    listed = {entry["step"]: entry["state"] for entry in catalog.list_checkpoints(tmp_path)}
    assert listed == {10: "committed", 15: "committed"}


def test_late_state_is_void_even_when_the_later_round_never_committed(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 40)
    late = tmp_path / "late"
    newest(tmp_path).rename(late)
    second = CheckpointManager(tmp_path)
    second.restore()
    second.close()
    late.rename(tmp_path / "step-000000000040")
    third = CheckpointManager(tmp_path)
    restored = third.restore()
    third.close()
    assert restored is not None
    assert restored.step == 10
    assert restored.skipped == ((str(tmp_path / "step-000000000040"), "void: round 2 started from step 10, below it"),)


def restore_on_ranks(rank: int, world_size: int, store: dist.Store, base: Path, shared: bool) -> tuple[int, list[str]]:
    directory = base if shared else base / str(rank)
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, commit_timeout_seconds=20)
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert_same(restored.state, cut_state(restored.step))
    return restored.step, [reason for _, reason in restored.skipped]


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip_byte(shard(tmp_path), -1)
    results = run_ranks(3, restore_on_ranks, tmp_path, True)
    assert [step for step, _ in results] == [2, 2, 2]
    assert results[0] == results[1] == results[2]


def save_on_local_disks(rank: int, world_size: int, store: dist.Store, base: Path) -> list[str]:
    states: list[str] = []
    manager = CheckpointManager(
        base / str(rank), rank=rank, world_size=world_size, store=store, on_result=lambda r: states.append(r.state)
    )
    for step in (1, 2):
        manager.save(step, cut_state(step))
    manager.close()
    return states


def test_ranks_with_disks_of_their_own_write_a_whole_copy_each_and_fall_back_when_all_are_damaged(
    tmp_path: Path,
) -> None:
    assert run_ranks(3, save_on_local_disks, tmp_path) == [["committed", "committed"]] * 3
    for rank in range(3):
        (file,) = (tmp_path / str(rank) / "step-000000000002").glob("shard-*")
        assert file.name == "shard-00000-of-00001.safetensors"
        assert not list((tmp_path / str(rank)).glob(".*"))
    for rank in range(3):
        flip_byte(shard(tmp_path / str(rank)), -1)
    results = run_ranks(3, restore_on_ranks, tmp_path, False)
    assert [step for step, _ in results] == [1, 1, 1]
    assert "checksum" in results[2][1][0]
