"""The staging buffer: warm, aligned, kept; and what a save copies into it."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoints.manager import CheckpointManager
from checkpoints.staging import StagingBuffer
from checkpoints.storage import PAGE_BYTES
from tests.checkpoints.support import cut_state


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def test_buffer_is_aligned_and_kept_until_a_larger_one_is_needed() -> None:
    buffer = StagingBuffer()
    first = buffer.reserve(100_000)
    assert first.data_ptr() % PAGE_BYTES == 0
    assert buffer.reserve(50_000).data_ptr() == first.data_ptr()
    assert buffer.reserve(100_000).numel() == 100_000
    assert buffer.reserve(10_000_000).numel() == 10_000_000
    buffer.close()
    buffer.close()


def test_buffer_is_touched_before_it_is_handed_out() -> None:
    buffer = StagingBuffer()
    before = resident_bytes()
    buffer.warm(64 << 20)
    buffer.reserve(64 << 20)
    assert resident_bytes() - before > 60 << 20
    buffer.close()


def test_buffer_is_warm_before_the_first_save_after_a_restore(tmp_path: Path) -> None:
    for _ in range(2):
        manager = CheckpointManager(tmp_path)
        manager.restore(cut_state(0))
        buffer = manager._stager.buffer
        warm = buffer.reserve(1).data_ptr()
        manager.save(manager.round, cut_state(1))
        assert buffer.reserve(1).data_ptr() == warm
        manager.close()


def test_memory_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(4 << 20)}
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state)
    manager.wait()
    before = resident_bytes()
    for step in range(2, 12):
        manager.save(step, state)
    manager.wait()
    assert resident_bytes() - before < 8 << 20
    manager.close()
