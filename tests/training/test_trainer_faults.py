"""Overflow, NaN, weights of zero, bad data and settings: the same outcome on every rank, and no hang."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.training.trainer import TrainerConfig
from tests.support.ranks import RankFailedError
from tests.training.worlds import Sentences, SentenceTask, train


class Spoiled(SentenceTask):
    """The batches that hold item `index` get `factor` on their loss; `silent` ones count for nothing."""

    def __init__(self, *, index: int, factor: float, silent: bool = False, once: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.index, self.factor, self.silent, self.once = index, factor, silent, once
        self.extra: list[float] = []

    def dataset(self) -> Numbered:
        return Numbered(self.size)

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        total, weight = super().loss(model, batch[:2])
        if (batch[2] == self.index).any() and not (self.once and len(self.steps) > 0):
            return total * self.factor, 0 if self.silent else weight
        return total, weight


class Numbered(Sentences):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return *super().__getitem__(index), torch.tensor(index)


def first_item(size: int, position: int) -> int:
    from elastic.training.sampler import EpochOrder

    return EpochOrder(size=size, seed=0, epoch=0).indices(position, position + 1)[0]


@pytest.mark.parametrize("position", [0, 5, 11])  # in the first, a middle and the last micro-batch of step 1
def test_fp16_overflow_within_an_accumulation_skips_one_step_everywhere(position: int) -> None:
    task = Spoiled(index=first_item(48, position), factor=float("inf"), size=48)
    config = TrainerConfig(global_batch_size=12, micro_batch_size=2, steps=4, precision="fp16", schedule="linear")
    runs = train(2, task, config)
    for run in runs:
        assert [s.applied for s in run.steps] == [False, True, True, True]
        assert [s.learning_rate for s in run.steps] == [0.5, 0.5, 0.375, 0.25]  # follows step - skipped
        assert run.digests == runs[0].digests
        assert run.scale == 65536.0 / 2
        assert run.skipped == 1
    assert runs[0].digests[0] != runs[0].digests[1]


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("micro", [12, 4, 2])  # one of three ranks without a micro-batch, one each, two each
def test_an_inf_in_a_batch_of_weight_zero_never_reaches_the_gradient(factor: float, micro: int) -> None:
    size, order = 12, [first_item(12, i) for i in range(12)]
    for position in (0, 11):  # the first and the last micro-batch of the step
        if micro == 12 and position == 11:
            continue
        spoiled = Spoiled(index=order[position], factor=factor, silent=True, size=size, double=True)
        runs = train(3, spoiled, TrainerConfig(global_batch_size=12, micro_batch_size=micro, steps=2))
        for run in runs:
            assert run.digests == runs[0].digests
            assert all(np.isfinite(value).all() for value in run.parameters.values())
            if micro == 12:  # nothing else was in the step: it is skipped everywhere
                assert [s.applied for s in run.steps] == [False, False]
            else:
                assert [s.applied for s in run.steps] == [True, True]
                assert all(np.isfinite(s.loss) and np.isfinite(s.grad_norm) for s in run.steps)
        if micro != 12:
            alone = train(1, spoiled, TrainerConfig(global_batch_size=12, micro_batch_size=micro, steps=2))[0]
            assert [s.weight for s in alone.steps] == [s.weight for s in runs[0].steps]
            assert [s.loss for s in alone.steps] == pytest.approx([s.loss for s in runs[0].steps], rel=1e-9)


def test_a_rank_without_a_share_may_hold_an_inf() -> None:
    config = TrainerConfig(global_batch_size=4, micro_batch_size=2, steps=3)
    runs = train(3, SentenceTask(size=40), config)
    assert [s.samples for s in runs[2].steps] == [()] * 3
    assert {tuple(run.digests) for run in runs} == {tuple(runs[0].digests)}


def test_a_non_finite_gradient_ends_the_job_on_all_ranks() -> None:
    task = Spoiled(index=first_item(48, 9), factor=float("nan"), size=48)
    config = TrainerConfig(global_batch_size=12, micro_batch_size=2, steps=4)
    with pytest.raises(RankFailedError, match=r"NonFiniteGradientError.*step 1.*nonfinite='skip'"):
        train(2, task, config)


def test_a_non_finite_gradient_is_skipped_where_that_is_asked_for() -> None:
    task = Spoiled(index=first_item(48, 9), factor=float("nan"), size=48)
    config = TrainerConfig(global_batch_size=12, micro_batch_size=2, steps=3, nonfinite="skip")
    runs = train(2, task, config)
    for run in runs:
        assert [s.applied for s in run.steps] == [False, True, True]
        assert run.digests == runs[0].digests


class Negative(SentenceTask):
    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        return super().loss(model, batch)[0], -1


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        (SentenceTask(size=0), {}, r"JobFailedError: the dataset Sentences is empty"),
        (SentenceTask(size=5), {"drop_last": True}, r"JobFailedError: the dataset has 5 items and drop_last"),
        (Negative(), {}, r"UsageError: Task.loss returned the weight -1"),
        (SentenceTask(), {"parallel": "dp"}, r"UsageError: parallel 'dp' runs in one process, and the world has 2"),
        (SentenceTask(), {"static_graph": True}, r"UsageError: static_graph does not work with gradient accumulation"),
        (SentenceTask(), {"device": "cuda"}, r"UsageError: local rank \d has no GPU"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(task: SentenceTask, change: dict[str, Any], words: str) -> None:
    if "device" in change and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = dataclasses.replace(TrainerConfig(global_batch_size=8, micro_batch_size=2, steps=2), **change)
    with pytest.raises(RankFailedError, match=words):
        train(2, task, config)


def test_other_data_other_seed_and_another_model_are_refused(tmp_path: Path) -> None:
    config = TrainerConfig(global_batch_size=8, micro_batch_size=4, steps=2, checkpoint_dir=str(tmp_path))
    train(1, SentenceTask(size=40), config)
    later = dataclasses.replace(config, steps=4)
    with pytest.raises(RankFailedError, match="DatasetChangedError"):
        train(2, SentenceTask(size=41), later, round=2)
    with pytest.raises(RankFailedError, match=r"DatasetChangedError.*seed 0.*seed 9"):
        train(1, SentenceTask(size=40), dataclasses.replace(later, seed=9), round=3)
    with pytest.raises(RankFailedError, match=r"JobFailedError(.|\n)*hidden\.0\.weight"):
        train(2, SentenceTask(size=40, double=True), later, round=4)
    with pytest.raises(RankFailedError, match=r"JobFailedError.*optimizer"):
        train(1, SentenceTask(size=40, frozen=True), later, round=5)
    assert train(3, SentenceTask(size=40), later, round=6)[0].step == 4
