"""The same global batch is the same update, however it is cut and whoever runs it; nothing is lost or used twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastic.training.trainer import TrainerConfig
from tests.training.worlds import Ran, SentenceTask, samples_used, train


def relative_difference(a: Ran, b: Ran) -> float:
    """Largest difference of any parameter, relative to the largest value of its tensor."""
    return max(
        float(np.abs(a.parameters[name] - b.parameters[name]).max() / np.abs(b.parameters[name]).max())
        for name in a.parameters
    )


def test_ranks_by_micro_steps_makes_no_difference() -> None:
    runs = {}
    for world_size, micro in [(1, 8), (2, 4), (4, 2), (8, 1)]:
        config = TrainerConfig(
            global_batch_size=16, micro_batch_size=2, steps=6, schedule="cosine", warmup_steps=2, grad_clip_norm=0.5
        )
        assert world_size * micro == 16 // 2
        runs[world_size] = train(world_size, SentenceTask(size=40, double=True), config)
    alone = runs[1][0]
    assert [s.learning_rate for s in alone.steps][:3] == [0.25, 0.5, 0.5]
    for ranks in runs.values():
        for run in ranks:
            assert relative_difference(run, alone) < 1e-6
            assert [s.loss for s in run.steps] == pytest.approx([s.loss for s in alone.steps], rel=1e-9)
            assert [s.learning_rate for s in run.steps] == [s.learning_rate for s in alone.steps]
            assert [s.weight for s in run.steps] == [s.weight for s in alone.steps]
            assert [s.grad_norm for s in run.steps] == pytest.approx([s.grad_norm for s in alone.steps], rel=1e-6)


def test_accumulation_of_unequal_token_counts_is_the_update_of_one_big_batch() -> None:
    big = train(1, SentenceTask(size=40), TrainerConfig(global_batch_size=20, micro_batch_size=20, steps=4))[0]
    cut = train(2, SentenceTask(size=40), TrainerConfig(global_batch_size=20, micro_batch_size=3, steps=4))
    for run in cut:
        assert relative_difference(run, big) < 1e-5
        assert [s.loss for s in run.steps] == pytest.approx([s.loss for s in big.steps], rel=1e-6)


def test_bytes_on_the_wire_do_not_grow_with_accumulation() -> None:
    sent = [
        train(2, SentenceTask(), TrainerConfig(global_batch_size=16, micro_batch_size=micro, steps=3))[0].comm_bytes
        for micro in (8, 1)
    ]
    parameters = 11 * 16 + 3 * (16 * 16 + 16) + 16 * 11 + 11
    assert sent == [3 * 4 * parameters] * 2


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [1, 7, 63])
def test_every_sample_of_a_small_dataset_counts_once_per_epoch(world_size: int, size: int) -> None:
    config = TrainerConfig(global_batch_size=16, micro_batch_size=3, epochs=2)
    runs = train(world_size, SentenceTask(size=size), config)
    for epoch in range(2):
        assert samples_used(runs, epoch=epoch) == list(range(size))
    for run in runs:
        assert run.digests == runs[0].digests
        assert all(np.isfinite(s.loss) and s.applied for s in run.steps)


def test_a_global_batch_smaller_than_the_world_trains_the_same() -> None:
    config = TrainerConfig(global_batch_size=2, micro_batch_size=1, steps=5)
    alone, together = train(1, SentenceTask(), config)[0], train(3, SentenceTask(), config)
    assert [s.samples for s in together[2].steps] == [()] * 5
    for run in together:
        assert relative_difference(run, alone) < 1e-5
        assert run.digests == together[0].digests


def test_dropout_and_augmentation_do_not_depend_on_the_world_size() -> None:
    config = TrainerConfig(global_batch_size=12, micro_batch_size=3, steps=4)
    task = SentenceTask(size=30, dropout=0.3, noisy=True, double=True)
    alone, together = train(1, task, config)[0], train(3, task, config)
    assert [s.loss for s in together[0].steps] == pytest.approx([s.loss for s in alone.steps], rel=1e-9)
    assert relative_difference(together[0], alone) < 1e-9


def test_a_resize_loses_and_repeats_no_sample(tmp_path: Path) -> None:
    config = TrainerConfig(global_batch_size=8, micro_batch_size=2, epochs=2, checkpoint_dir=str(tmp_path))
    straight = train(1, SentenceTask(size=61, double=True), config.__class__(
        global_batch_size=8, micro_batch_size=2, epochs=2))[0]  # fmt: skip
    first = train(3, SentenceTask(size=61, double=True), config, stop_after=3)
    second = train(2, SentenceTask(size=61, double=True), config, stop_after=11, round=2)
    third = train(4, SentenceTask(size=61, double=True), config, round=3)
    assert [run.drained for run in first + second + third] == [True] * 5 + [False] * 4
    for epoch in range(2):
        assert samples_used(first + second + third, epoch=epoch) == list(range(61))
    assert relative_difference(third[0], straight) < 1e-9
