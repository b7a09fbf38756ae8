"""Bad settings are refused when they are made, by name and with a remedy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from elastic.errors import UsageError
from elastic.training.environment import Every, parse_every, read_environment
from elastic.training.schedule import batch_factor, rate_factor
from elastic.training.trainer_config import TrainerConfig

GOOD: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 4, "steps": 10}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 0}, ["global_batch_size", "0", "at least 1"]),
        ({"global_batch_size": 8.0}, ["global_batch_size", "8.0", "whole number"]),
        ({"global_batch_size": True}, ["global_batch_size", "True"]),
        ({"global_batch_size": None}, ["global_batch_size", "None"]),
        ({"micro_batch_size": -1}, ["micro_batch_size", "-1"]),
        ({"micro_batch_size": 9}, ["micro_batch_size 9", "global_batch_size 8"]),
        ({"steps": None}, ["steps", "epochs", "exactly one"]),
        ({"epochs": 1}, ["steps is 10", "epochs is 1"]),
        ({"steps": 0}, ["steps", "0"]),
        ({"precision": "fp8"}, ["precision", "fp8", "bf16"]),
        ({"parallel": "fsdp"}, ["parallel", "fsdp", "ddp"]),
        ({"compression": "zip"}, ["compression", "zip", "powersgd"]),
        ({"schedule": "step"}, ["schedule", "cosine"]),
        ({"nonfinite": "ignore"}, ["nonfinite", "skip"]),
        ({"device": "tpu"}, ["device", "tpu"]),
        ({"grad_clip_norm": 0.0}, ["grad_clip_norm", "0.0"]),
        ({"grad_clip_norm": float("nan")}, ["grad_clip_norm", "nan"]),
        ({"final_lr_ratio": 1.5}, ["final_lr_ratio", "1.5"]),
        ({"warmup_steps": 11}, ["warmup_steps 11", "steps 10"]),
        ({"lr_scaling": "linear"}, ["lr_scaling", "reference_batch_size"]),
        ({"loader_workers": -1}, ["loader_workers", "-1"]),
        ({"loader_start_method": "thread"}, ["loader_start_method", "thread"]),
        ({"loader_timeout_seconds": 0}, ["loader_timeout_seconds", "seconds"]),
        ({"collective_timeout_seconds": float("inf")}, ["collective_timeout_seconds"]),
        ({"checkpoint_every": "soon"}, ["checkpoint_every", "soon", "30s"]),
        ({"checkpoint_every": 0}, ["checkpoint_every", "0"]),
        ({"checkpoint_keep_last": 0}, ["checkpoint_keep_last"]),
        ({"evaluate_every": 0}, ["evaluate_every"]),
        ({"compression": "fp16", "parallel": "none"}, ["compression", "parallel"]),
        ({"compression": "powersgd", "powersgd_start_step": 1}, ["powersgd_start_step", "2"]),
        ({"seed": "x"}, ["seed", "'x'"]),
    ],
)
def test_a_bad_value_is_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        TrainerConfig(**{**GOOD, **change})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "every"),
    [("100", Every(steps=100)), (5, Every(steps=5)), ("30s", Every(seconds=30.0)), ("0.5s", Every(seconds=0.5))],
)
def test_an_interval_is_steps_or_time(text: str | int, every: Every) -> None:
    assert parse_every(text, name="x") == every


@pytest.mark.parametrize("text", ["", "s", "-3", "0", "0s", "1.5", "infs", "nans", True])
def test_an_interval_that_is_neither_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match="checkpoint-every"):
        parse_every(text, name="checkpoint-every")


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match=r"WORLD_SIZE.*'two'"):
        read_environment({"WORLD_SIZE": "two"})


def test_alone_is_a_world_of_one() -> None:
    alone = read_environment({})
    assert (alone.rank, alone.world_size, alone.round, alone.launched) == (0, 1, 1, False)


def test_under_torchrun_the_round_counts_its_restarts() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_RUN_ID": "none"}
    worker = read_environment(env)
    assert (worker.round, worker.launched, worker.elastic) == (4, True, True)


def test_warm_up_rises_to_the_rate_and_schedules_end_where_they_should() -> None:
    for schedule, last in (("constant", 1.0), ("linear", 0.1), ("cosine", 0.1)):
        config = TrainerConfig(**{**GOOD, "steps": 100, "schedule": schedule, "warmup_steps": 4, "final_lr_ratio": 0.1})
        factors = [rate_factor(config, update, 100) for update in range(101)]
        assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
        assert factors[100] == pytest.approx(last)
        assert all(a >= b for a, b in itertools.pairwise(factors[4:]))


def test_the_rate_follows_the_global_batch_as_asked() -> None:
    def factor(kind: str) -> float:
        return batch_factor(TrainerConfig(**{**GOOD, "lr_scaling": kind, "reference_batch_size": 2}))

    assert (factor("none"), factor("linear"), factor("sqrt")) == (1.0, 4.0, 2.0)
