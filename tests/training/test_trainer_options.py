"""Evaluation, buffers, compression, compile, DataParallel and loader workers."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.training.trainer import Evaluation, TrainerConfig
from tests.support.ranks import RankFailedError
from tests.training.worlds import Model, Ran, Sentences, SentenceTask, train

BASE = TrainerConfig(global_batch_size=12, micro_batch_size=2, steps=6)


class Evaluated(SentenceTask):
    """Evaluates on 21 items; its model would show whether evaluation left a trace."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra: list[tuple[int, float, float, bool]] = []

    def evaluation_dataset(self) -> Sentences:
        return Sentences(21, noisy=True)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        assert self.live is not None
        self.extra.append((evaluation.step, evaluation.loss, evaluation.weight, self.live.training))


def test_evaluation_is_the_mean_over_its_data_in_any_world_and_leaves_no_trace() -> None:
    config = dataclasses.replace(BASE, evaluate_every=2, evaluation_batch_size=1)
    options: dict[str, Any] = {"dropout": 0.2, "noisy": True, "double": True}
    without = train(2, SentenceTask(**options), BASE)[0]
    worlds = {n: train(n, Evaluated(**options), config) for n in (1, 2, 3)}
    assert worlds[2][0].digests == without.digests
    for runs in worlds.values():
        for run in runs:
            assert [step for step, *_ in run.extra] == [2, 4, 6]
            assert all(training for *_, training in run.extra)
            assert [loss for _, loss, *_ in run.extra] == pytest.approx(
                [loss for _, loss, *_ in worlds[1][0].extra], rel=1e-9
            )
            assert {weight for *_, weight, _ in run.extra} == {sum(1 + i % 6 for i in range(21))}
            assert run.evaluation == run.extra[-1][1]


class Normed(SentenceTask):
    """With BatchNorm, and a table that never changes."""

    def model(self) -> nn.Module:
        super().model()
        self.live = NormedModel()
        return self.live


class NormedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x.flatten(0, 1)).unflatten(0, tokens.shape))


def test_buffers_are_the_same_on_all_ranks_after_every_step() -> None:
    runs = train(3, Normed(size=40), dataclasses.replace(BASE, find_unused_parameters=True))
    assert runs[0].digests == runs[1].digests == runs[2].digests
    assert runs[0].parameters["norm.num_batches_tracked"] == 11  # rank 0: 2 2 2 1 2 2, none by the dry run


def test_a_global_batch_that_leaves_one_item_over_is_cut_evenly() -> None:
    runs = train(2, Normed(size=40), dataclasses.replace(BASE, global_batch_size=9, micro_batch_size=4,
                                                        find_unused_parameters=True))  # fmt: skip
    assert len(runs[0].steps) == 6


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2), ("powersgd", 1.0)])
def test_compressed_gradients_train_alike_and_send_less(compression: Any, tolerance: float) -> None:
    config = dataclasses.replace(BASE, bucket_megabytes=0.001, powersgd_start_step=2, steps=8)
    plain = train(2, SentenceTask(), config)
    narrow = train(2, SentenceTask(), dataclasses.replace(config, compression=compression))
    assert narrow[0].digests == narrow[1].digests
    assert narrow[0].loss == pytest.approx(plain[0].loss, rel=0.2)
    difference = max(
        float(np.abs(narrow[0].parameters[name] - value).max()) for name, value in plain[0].parameters.items()
    )
    assert 0 < difference < tolerance
    if compression != "powersgd":
        assert narrow[0].comm_bytes * 2 == plain[0].comm_bytes
    else:
        assert narrow[0].comm_bytes < plain[0].comm_bytes


def test_a_compiled_model_trains_and_keeps_its_names() -> None:
    config = dataclasses.replace(BASE, compile=True, compile_backend="eager")
    plain, compiled = train(2, SentenceTask(), BASE), train(2, SentenceTask(), config, timeout_seconds=110)
    assert compiled[0].parameters.keys() == plain[0].parameters.keys()
    assert compiled[0].loss == pytest.approx(plain[0].loss, rel=1e-5)


@pytest.mark.parametrize("parallel", ["dp", "none"])
def test_one_process_can_do_without_ddp(parallel: Any) -> None:
    plain, other = (
        train(1, SentenceTask(), BASE),
        train(1, SentenceTask(), dataclasses.replace(BASE, parallel=parallel)),
    )
    assert other[0].digests == plain[0].digests


def test_a_schedule_of_the_task_wins() -> None:
    assert [s.learning_rate for s in train(1, Scheduled(), BASE)[0].steps] == [0.5 / (1 + u) for u in range(6)]


class Scheduled(SentenceTask):
    def rate_factor(self, update: int) -> float:
        return 1 / (1 + update)


class Stateful(SentenceTask):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.steps), "table": torch.arange(3)}

    def load_state_dict(self, state: Any) -> None:
        self.extra = (state["seen"], state["table"].tolist())


def test_the_tasks_own_state_comes_back(tmp_path: Any) -> None:
    config = dataclasses.replace(BASE, checkpoint_dir=str(tmp_path))
    train(2, Stateful(), config, stop_after=2)
    assert train(3, Stateful(), config, round=2)[1].extra == (3, [0, 1, 2])


class Dying(SentenceTask):
    """Item 5 ends the process that fetches it, or raises."""

    def __init__(self, *, how: str) -> None:
        super().__init__(size=12)
        self.how = how

    def dataset(self) -> Sentences:
        return DyingSentences(12, how=self.how)

    def fingerprint(self, dataset: Any) -> str:
        return ""


class DyingSentences(Sentences):
    def __init__(self, size: int, *, how: str) -> None:
        super().__init__(size)
        self.how = how

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 5:
            raise ValueError("item 5 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("how", "words"), [("killed", r"LoaderDiedError.*loader_workers=0"), ("raised", r"ValueError.*\n(.*\n)*.*item 5")]
)
def test_an_error_in_the_loader_is_told_as_what_it_is(how: str, words: str) -> None:
    config = dataclasses.replace(BASE, loader_workers=1, loader_start_method="fork", micro_batch_size=12, steps=1)
    with pytest.raises(RankFailedError, match=words):
        train(1, Dying(how=how), config)


def test_loader_workers_started_by_spawn_give_the_same() -> None:
    config = dataclasses.replace(BASE, loader_workers=1, loader_start_method="spawn", steps=3)
    task = SentenceTask(noisy=True)
    spawned: Ran = train(1, task, config, timeout_seconds=110)[0]
    assert spawned.digests == train(1, task, dataclasses.replace(config, loader_workers=0))[0].digests
