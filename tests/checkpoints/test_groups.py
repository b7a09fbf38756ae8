"""Writing groups: ranks that see the same files write one copy together; committed means committed in every group."""

from __future__ import annotations

import errno
from pathlib import Path

import torch.distributed as dist

from checkpoints import catalog
from checkpoints.manager import CheckpointManager
from tests.checkpoints.support import FaultyStorage, assert_same, cut_state, fail_with
from tests.support.ranks import run_ranks


def save_on_two_nodes(rank: int, world_size: int, store: dist.Store, base: Path) -> list[tuple[str, str | None]]:
    """Four ranks on two nodes; the disk of node 1 refuses its leader's manifest of step 2."""
    storage = FaultyStorage(fail_with(errno.EIO))
    results: list[tuple[str, str | None]] = []
    manager = CheckpointManager(
        base / str(rank // 2),
        rank=rank,
        world_size=world_size,
        store=store,
        storage=storage,
        on_result=lambda result: results.append((result.state, result.error)),
        commit_timeout_seconds=30,
    )
    manager.restore()
    for step in (1, 2, 3):
        if (rank, step) == (2, 2):
            storage.arm(3)
        manager.save(step, cut_state(step))
        manager.wait()
        storage.disarm()
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert restored.step == 3
    assert_same(restored.state, cut_state(3))
    return results


def test_two_nodes_with_local_disks_write_a_whole_copy_each_and_fail_together(tmp_path: Path) -> None:
    results = run_ranks(4, save_on_two_nodes, tmp_path)
    assert results == [results[0]] * 4
    assert [state for state, _ in results[0]] == ["committed", "failed", "committed"]
    assert "the group of rank 2: rank 2 could not publish" in str(results[0][1][1])
    for node in (0, 1):
        files = sorted(path.name for path in (tmp_path / str(node) / "step-000000000003").glob("shard-*"))
        assert files == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
        assert {entry["state"] for entry in catalog.verify(tmp_path / str(node))} == {"committed"}
        assert (tmp_path / str(node) / "rounds.json").exists()
    commits = [catalog.show(tmp_path / str(node), 3)["commit"] for node in (0, 1)]
    assert commits[0] == commits[1]


def restore_alone(rank: int, world_size: int, store: dist.Store, base: Path) -> int:
    manager = CheckpointManager(base / "1", rank=rank, world_size=world_size, store=store)
    restored = manager.restore()
    manager.close()
    assert restored is not None
    return restored.step


def test_one_surviving_node_restores_from_its_own_copy(tmp_path: Path) -> None:
    run_ranks(4, save_on_two_nodes, tmp_path)
    assert run_ranks(2, restore_alone, tmp_path) == [3, 3]
