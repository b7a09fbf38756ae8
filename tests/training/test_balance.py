"""Dealing by speed: by table, and with ranks of which one is slow. Who runs what changes, the training does not."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest
import torch

from elastic.training.balance import Deal, Schedule, better_deal, counts_by_speed, slow_ranks, slowdowns, step_seconds
from elastic.training.batching import Position, StepPlan
from elastic.training.environment import WorkerEnvironment
from elastic.training.pace import Pace
from elastic.training.session import Session
from elastic.training.trainer import TrainerConfig
from tests.training.test_trainer_equivalence import relative_difference
from tests.training.worlds import Ran, SentenceTask, samples_used, train


@pytest.mark.parametrize(
    ("micro_batches", "seconds", "counts"),
    [
        (8, (1.0, 1.0), (4, 4)),
        (9, (1.0, 1.0), (5, 4)),
        (8, (1.0, 3.0), (6, 2)),
        (8, (3.0, 1.0, 1.0), (1, 4, 3)),
        (4, (1.0, 1.0, 9.0), (2, 1, 1)),  # each gets one: it would run one in any case
        (2, (9.0, 1.0, 1.0), (0, 1, 1)),
        (1, (1.0, 1.0, 0.5), (0, 0, 1)),
        (8, (1.0, 1.05), (4, 4)),
        (0, (1.0, 2.0), (0, 0)),
    ],
)
def test_shares_follow_speed(micro_batches: int, seconds: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert counts_by_speed(micro_batches, seconds) == counts


@pytest.mark.parametrize("seconds", [(), (1.0, 2.0, 0.3), (5.0, 5.0, 5.0), (1.0, 100.0, 1.0)])
@pytest.mark.parametrize("micro_batches", [0, 1, 2, 3, 7, 64])
def test_every_micro_batch_is_dealt_once_and_contiguously(micro_batches: int, seconds: tuple[float, ...]) -> None:
    deal = Deal(world_size=3, seconds=seconds)
    bounds = [deal.bounds(micro_batches, rank) for rank in range(3)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(micro_batches))
    assert deal.counts(micro_batches) == [stop - start for start, stop in bounds]


@pytest.mark.parametrize("seconds", list(itertools.product((1.0, 1.7, 4.0), repeat=3)))
def test_no_other_deal_is_faster(seconds: tuple[float, ...]) -> None:
    ours = step_seconds(Deal(world_size=3, seconds=seconds), seconds, 9)
    for a, b in itertools.product(range(1, 8), repeat=2):
        if 9 - a - b >= 1:
            assert ours <= max(a * seconds[0], b * seconds[1], (9 - a - b) * seconds[2]) + 1e-12


def test_a_small_gain_is_no_reason_to_deal_anew() -> None:
    even = Deal(world_size=2)
    assert better_deal(even, (1.0, 1.04), 64) is even
    assert better_deal(even, (1.0, 3.0), 64).counts(64) == [48, 16]
    slow = Deal(world_size=2, seconds=(1.0, 3.0))
    assert better_deal(slow, (1.0, 1.0), 64).counts(64) == [32, 32], "it has recovered"


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ((0.1, 0.3), {1}),
        ((0.1, 0.14), set()),  # below the factor
        ((0.0127, 0.019), set()),  # a busy host, and not a slow rank
        ((0.0127, 0.0327), {1}),
        ((0.03, 0.05, 0.03, 0.05, 0.03), {1, 3}),
    ],
)
def test_a_rank_is_slow_by_a_factor_and_by_what_can_be_noticed(seconds: tuple[float, ...], slow: set[int]) -> None:
    assert slow_ranks(seconds, 1.5) == slow


def test_slowness_is_relative_to_the_median() -> None:
    assert slowdowns((1.0, 3.0)) == [1.0, 3.0]
    assert slowdowns((2.0, 2.0, 6.0)) == [1.0, 1.0, 3.0]


def test_what_was_told_of_a_step_stands() -> None:
    schedule = Schedule(Deal(world_size=2))
    slow = Deal(world_size=2, seconds=(1.0, 3.0))
    assert schedule.at(7).counts(8) == [4, 4]
    schedule.change(slow, from_step=9)
    assert [schedule.at(step).counts(8) for step in (7, 8, 9, 100)] == [[4, 4], [4, 4], [6, 2], [6, 2]]
    with pytest.raises(RuntimeError, match="step 100 is dealt already: step 100"):
        schedule.change(slow, from_step=100)


class OneSlow(SentenceTask):
    """The last of `ranks` ranks takes ten times as long for a micro-batch, so that a busy machine does not hide it."""

    def __init__(self, *, ranks: int, size: int) -> None:
        super().__init__(size=size, double=True)
        self.ranks = ranks
        self.extra: list[float] = []

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        time.sleep(0.08 if os.environ["RANK"] == str(self.ranks - 1) else 0.008)
        return super().loss(model, batch)


@pytest.mark.parametrize(("ranks", "loader_workers"), [(2, 0), (3, 1)])
def test_a_slow_rank_gets_less_and_the_training_is_the_same(ranks: int, loader_workers: int) -> None:
    """94 samples in steps of 24: the last one of each epoch is smaller."""
    settings: dict[str, Any] = {"global_batch_size": 24, "micro_batch_size": 2, "epochs": 3, "speed_every": 4}
    even = train(1, SentenceTask(size=94, double=True), TrainerConfig(**settings))[0]
    config = TrainerConfig(**settings, balance="speed", loader_workers=loader_workers)
    runs = train(ranks, OneSlow(ranks=ranks, size=94), config)
    for epoch in range(3):
        assert samples_used(runs, epoch=epoch) == list(range(94))
    assert micro_batches_run(runs[-1])[:3] == [12 // ranks] * 3, "nothing is known of the ranks' speeds yet"
    late = micro_batches_run(runs[-1])[8:11]
    assert max(late) <= 12 // ranks - 1 - (ranks == 2), "many times as slow"
    assert min(late) >= 1
    for run in runs:
        assert run.digests == runs[0].digests
        assert relative_difference(run, even) < 1e-9
        assert [s.loss for s in run.steps] == pytest.approx([s.loss for s in even.steps], rel=1e-9)


def micro_batches_run(run: Ran) -> list[int]:
    return [len(step.samples) // 2 for step in run.steps]


def test_a_slow_rank_is_named_by_rank_0_and_on_its_own_node_with_the_nodes_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TrainerConfig(global_batch_size=4, micro_batch_size=1, steps=10)
    plan = StepPlan(step=5, epoch=0, start=0, stop=4, micro_batches=(), after=Position())

    def told(rank: int, seconds: tuple[float, ...]) -> list[str]:
        environment = WorkerEnvironment(rank=rank, memory_rank=rank % 2, world_size=4, node_id="ab"[rank // 2])
        pace = Pace(config, Session(environment), base_step=0, compute=lambda: (0.0, 0))
        caplog.clear()
        pace.stepped(plan, seconds)
        pace.stepped(plan, (1.0, 1.0, 1.0, 1.0))
        return [message.partition(" step=5 ")[2].partition(":")[0] for message in caplog.messages]

    assert told(0, (1.0, 3.0, 1.0, 3.0)) == [f"rank {n} is {how}" for how in ("slow", "no longer slow") for n in (1, 3)]
    assert told(1, (1.0, 3.0, 1.0, 3.0)) == []
    assert told(2, (1.0, 3.0, 1.0, 3.0)) == []
    assert told(3, (1.0, 3.0, 1.0, 3.0)) == ["rank 3 on b is slow", "rank 3 on b is no longer slow"]
