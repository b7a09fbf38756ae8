"""Save and restore on several ranks: any number of them, states that differ, directories that were there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoints.errors import (
    CheckpointError,
    CheckpointMismatchError,
    UnsupportedStateError,
)
from checkpoints.manager import CheckpointManager
from tests.checkpoints.support import assert_same, cut_state, round_trip, small_state
from tests.support.ranks import run_ranks


def save_on_ranks(rank: int, world_size: int, store: dist.Store, directory: Path, step: int) -> tuple[Any, int]:
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, commit_timeout_seconds=20)
    before = store.num_keys()
    manager.restore()
    manager.save(step, cut_state(step), samples=step * 8)
    result = manager.wait()
    manager.close()
    return result, store.num_keys() - before


def restore_on_ranks(rank: int, world_size: int, store: dist.Store, directory: Path, step: int) -> bool:
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, commit_timeout_seconds=20)
    restored = manager.restore(cut_state(0))
    manager.close()
    assert restored is not None
    assert (restored.step, restored.samples) == (step, step * 8)
    assert_same(restored.state, cut_state(step))
    return True


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_state_is_resharded_to_any_world_size(tmp_path: Path, writers: int) -> None:
    results = run_ranks(writers, save_on_ranks, tmp_path, 7)
    assert [result.state for result, _ in results] == ["committed"] * writers
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("step-*/shard-*"))]
    assert len(sizes) == writers
    assert max(sizes) - min(sizes) < 80_000
    for readers in (1, 2, 3):
        assert run_ranks(readers, restore_on_ranks, tmp_path, 7) == [True] * readers


def many_saves(rank: int, world_size: int, store: dist.Store, directory: Path) -> tuple[list[str], int]:
    results: list[str] = []
    manager = CheckpointManager(
        directory, rank=rank, world_size=world_size, store=store, on_result=lambda r: results.append(r.state)
    )
    for step in range(1, 21):
        manager.save(step, small_state(step))
    manager.close()
    while rank == 0 and store.check(["done"]) is False:  # rank 0 looks when the other has closed
        pass
    store.set("done", "")
    return results, store.num_keys()


def test_commits_leave_no_keys_in_the_store(tmp_path: Path) -> None:
    (states, keys), _ = run_ranks(2, many_saves, tmp_path)
    assert states == ["committed"] * 20
    assert keys < 8


def differing_states(rank: int, world_size: int, store: dist.Store, directory: Path) -> tuple[str, str, str]:
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store)
    manager.save(1, {"w": torch.ones(2 + rank)})
    first = manager.wait()
    refused = ""
    try:
        manager.save(2, {"w": torch.ones(2) if rank == 0 else object()})
    except UnsupportedStateError as exc:
        refused = str(exc)
    second = manager.wait()
    manager.save(3, {"w": torch.ones(2)})
    third = manager.wait()
    manager.close()
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.state, second.state, third.state) == ("failed", "failed", "committed")
    return str(first.error), str(second.error), refused


def test_ranks_whose_states_differ_do_not_commit_and_all_learn_why(tmp_path: Path) -> None:
    (form, leaf, none), (form_1, leaf_1, refused) = run_ranks(2, differing_states, tmp_path)
    assert form == form_1
    assert "rank 1's state differ" in form
    assert leaf == leaf_1
    assert "state['w'] is a <class 'object'>" in leaf
    assert none == ""
    assert "state['w']" in refused


def mismatch_on_one_rank(rank: int, world_size: int, store: dist.Store, directory: Path) -> str:
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store)
    try:
        manager.restore({"model": {"weight": torch.ones(16, 8 + rank)}})
    except CheckpointMismatchError as exc:
        return str(exc)
    finally:
        manager.close()
    return ""


def test_mismatch_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    round_trip(tmp_path, {"model": {"weight": torch.ones(16, 8)}})
    first, second = run_ranks(2, mismatch_on_one_rank, tmp_path)
    assert first == second
    assert "model/weight" in first


def save_without_restore(rank: int, world_size: int, store: dist.Store | None, base: Path, shared: bool) -> str:
    directory = base if shared else base / str(rank)
    manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store, commit_timeout_seconds=20)
    try:
        manager.save(9, small_state(9))
    except CheckpointError as exc:
        refused = str(exc)
    else:
        refused = ""
    assert manager.wait() is None or not refused
    manager.restore(allow_fresh_start=True)
    manager.save(9, small_state(9))
    result = manager.wait()
    manager.close()
    assert result is not None
    assert result.state == "committed", result.error
    return refused


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "local"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_save_into_a_directory_with_checkpoints_wants_a_restore_first(tmp_path: Path, ranks: int, shared: bool) -> None:
    """Also when only the last rank's disk holds some."""
    round_trip(tmp_path if shared else tmp_path / str(ranks - 1), small_state(1))
    for message in run_ranks(ranks, save_without_restore, tmp_path, shared):
        assert "holds step-000000000001 and restore() was not called" in message


def test_save_into_a_directory_without_checkpoints_wants_no_restore(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert save_without_restore(0, 1, None, tmp_path, True) == ""
