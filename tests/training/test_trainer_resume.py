"""Interrupted training is uninterrupted training, bit for bit, at the same world size."""

from __future__ import annotations

import dataclasses
import logging
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest

from elastic.training.trainer import Trainer, TrainerConfig
from tests.support.ranks import run_ranks
from tests.training.worlds import Ran, SentenceTask, make_session, train

BASE = TrainerConfig(global_batch_size=12, micro_batch_size=2, epochs=3, grad_clip_norm=1.0)


def observed(runs: list[Ran]) -> list[tuple[object, ...]]:
    """Everything a step shows on rank 0, but for the round."""
    return [
        (s.step, s.epoch, s.applied, s.loss, s.weight, s.learning_rate, s.grad_norm, digest)
        for s, digest in zip(runs[0].steps, runs[0].digests, strict=True)
    ]


def make_task() -> SentenceTask:
    return SentenceTask(size=40, dropout=0.2, noisy=True, optimizer="adamw")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stop_and_resume_is_bit_equal(tmp_path: Path, world_size: int, precision: str) -> None:
    config = dataclasses.replace(
        BASE, precision=precision, loader_workers=1, schedule="cosine", warmup_steps=2, bucket_megabytes=0.001
    )
    config = dataclasses.replace(config, loader_start_method="fork")  # quick
    straight = train(world_size, make_task(), config)
    kept = dataclasses.replace(config, checkpoint_dir=str(tmp_path))
    first = train(world_size, make_task(), kept, stop_after=4)
    second = train(world_size, make_task(), kept, round=2)
    assert first[0].drained
    assert not second[0].drained
    assert observed(first) + observed(second) == observed(straight)
    assert {run.digests[-1] for run in second} == {straight[0].digests[-1]}


def test_a_drain_asked_of_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, checkpoint_dir=str(tmp_path))
    runs = train(3, make_task(), config, stop_after=3)
    assert [run.step for run in runs] == [4, 4, 4]  # asked after 3, agreed in 4
    assert all(run.drained for run in runs)
    assert (tmp_path / "step-000000000004" / "manifest.json").exists()


def test_finished_training_started_again_does_nothing(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, checkpoint_dir=str(tmp_path))
    first = train(2, make_task(), config)
    again = train(2, make_task(), config, round=2)
    assert again[0].steps == []
    assert again[0].step == first[0].step
    for name, value in first[0].parameters.items():
        assert (again[1].parameters[name] == value).all()


def _warned(rank: int, world_size: int, store: Any, config: TrainerConfig) -> list[str]:
    """What the Trainer warns of on this rank."""
    log = logging.getLogger("elastic.training.trainer")
    log.addHandler(handler := BufferingHandler(100))
    Trainer(make_task(), config, session=make_session(rank, world_size, store)).run()
    return [record.getMessage() for record in handler.buffer if record.levelno >= logging.WARNING]


def test_rank_0_says_that_nothing_is_left_to_train(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, checkpoint_dir=str(tmp_path))
    assert run_ranks(2, _warned, config) == [[], []]
    said = "nothing is left to train: step 12 is done already (epochs=3); raise that, or give another --checkpoint-dir"
    assert run_ranks(2, _warned, config) == [[said], []]


def test_fp16_resumes_with_its_scaler(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, precision="fp16")
    straight = train(2, make_task(), config)
    kept = dataclasses.replace(config, checkpoint_dir=str(tmp_path))
    first, second = train(2, make_task(), kept, stop_after=2), train(2, make_task(), kept, round=2)
    assert observed(first) + observed(second) == observed(straight)


def test_saves_come_at_their_steps_and_the_oldest_go(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, checkpoint_dir=str(tmp_path), checkpoint_every=2, checkpoint_keep_last=2)
    run = train(2, make_task(), config)[0]
    assert run.step == 12
    kept = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("step-"))
    assert kept[-1] == "step-000000000012"
    assert len(kept) == 2
