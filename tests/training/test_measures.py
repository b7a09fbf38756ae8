"""What a worker measures of itself: phases of a step, tensors in memory, collectives."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic import progress
from elastic.progress import Phase
from elastic.timings import STEP_PHASES
from elastic.training.environment import read_environment
from elastic.training.memory_meter import MemoryMeter
from elastic.training.phase_clock import PhaseClock
from elastic.training.session import Session
from elastic.training.task import AppliedStep
from elastic.training.trainer import Trainer, TrainerConfig
from tests.support.ranks import run_ranks
from tests.training.worlds import SentenceTask, make_session


class Now:
    def __init__(self) -> None:
        self.time = 5.0

    def __call__(self) -> float:
        return self.time


def spend(clock: PhaseClock, now: Now, *parts: tuple[Phase, float]) -> None:
    for phase, seconds in parts:
        clock.enter(phase)
        now.time += seconds


def test_each_moment_belongs_to_one_phase_and_micro_steps_add_up() -> None:
    now = Now()
    clock = PhaseClock(now)
    now.time += 100
    clock.take()
    spend(clock, now, (Phase.DATA, 1), (Phase.FORWARD_BACKWARD, 4), (Phase.DATA, 2), (Phase.FORWARD_BACKWARD, 8))
    spend(clock, now, (Phase.EVALUATION, 1000), (Phase.OPTIMIZER, 0.5))
    assert clock.take() == {"data": 3, "forward_backward": 12, "optimizer": 0.5}
    now.time += 0.25
    assert clock.take() == {"optimizer": 0.25}, "the phase goes on after a report"


def test_what_a_device_has_measured_keeps_the_sum_and_leaves_data_alone() -> None:
    now = Now()
    clock = PhaseClock(now)
    clock.device_seconds = lambda: {"comm_exposed": 2.0, "optimizer": 1.0}
    spend(clock, now, (Phase.DATA, 3), (Phase.FORWARD_BACKWARD, 1), (Phase.COMM_EXPOSED, 0.1), (Phase.OPTIMIZER, 8.9))
    spent = clock.take()
    assert spent == {"data": 3, "forward_backward": pytest.approx(7.0), "comm_exposed": 2, "optimizer": 1}
    clock.device_seconds = lambda: {"comm_exposed": 50.0, "optimizer": 1.0}
    spend(clock, now, (Phase.FORWARD_BACKWARD, 4))
    assert sum(clock.take().values()) == pytest.approx(4.0), "a late reading cannot make more than there was"


def test_before_the_loop_no_time_belongs_to_a_step_and_a_loop_that_names_no_phase_has_none(tmp_path: Path) -> None:
    progress.create(tmp_path / "block")
    agent = progress.ProgressReader(tmp_path / "block")
    session = Session(read_environment({"ELASTICD_PROGRESS": str(tmp_path / "block")}))
    with session.phase(Phase.DATA):
        time.sleep(0.05)
    session.enter_loop(step=0, base_step=0)
    session.report(step=1)
    assert agent.read_timings() is None
    with session.phase(Phase.DATA):
        time.sleep(0.02)
    session.report(step=2)
    timings = agent.read_timings()
    assert timings is not None
    assert timings["data"].count == 1
    assert 0.02 <= timings["data"].sum < 0.05
    assert timings["optimizer"].count == 0


def test_memory_kinds_are_those_of_the_tensors_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.BatchNorm1d(200), nn.Linear(200, 100))
    model[2].weight = nn.Parameter(model[0].weight.T)  # no copy: the storage is shared
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    meter = MemoryMeter(model, optimizer, torch.device("cpu"), Now())
    weights = 4 * (100 * 200 + 200 + 200 + 200 + 100) + 4 * (200 + 200) + 8
    assert meter.fields() == {"weights_bytes": weights, "gradients_bytes": 0, "optimizer_bytes": 0}
    model(torch.rand(4, 100)).sum().backward()
    optimizer.step()
    fields = meter.fields()
    numbers = sum(p.numel() for p in model.parameters())
    assert fields["gradients_bytes"] == 4 * numbers
    assert fields["optimizer_bytes"] == pytest.approx(8 * numbers, rel=0.01)
    assert "activations_bytes" not in fields
    assert meter.fields() == {}, "looked at once a second from the third step on"


class Timed(SentenceTask):
    """Notes when it was first and last told of a step; its data and its losses take a known time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[float] = []

    def collate(self, items: Any) -> Any:
        time.sleep(0.01)
        return super().collate(items)

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        time.sleep(0.02)
        return super().loss(model, batch)

    def tokens(self, batch: Any) -> int:
        return int(batch[0].shape[0])

    def on_step(self, step: AppliedStep) -> None:
        super().on_step(step)
        self.told.append(time.perf_counter())


CONFIG = TrainerConfig(global_batch_size=16, micro_batch_size=4, steps=6, checkpoint_every="2")


def _measured(rank: int, world_size: int, store: Any, folder: str) -> Any:
    block = Path(folder) / f"block-{rank}"
    progress.create(block)
    reader = progress.ProgressReader(block)
    session = make_session(rank, world_size, store, progress_path=str(block), checkpoint_dir=str(Path(folder) / "kept"))
    task = Timed(size=96, optimizer="adamw")
    Trainer(task, CONFIG, session=session).run()
    assert task.live is not None
    numbers = sum(p.numel() for p in task.live.parameters())
    return reader.read(), reader.read_timings(), task.told[-1] - task.told[0], numbers


def test_the_phases_of_real_steps_add_up_to_the_time_that_passed_and_memory_is_right(tmp_path: Path) -> None:
    for report, timings, seconds, numbers in run_ranks(2, _measured, str(tmp_path)):
        counts = {name: timings[name].count for name in STEP_PHASES}
        assert {counts[name] for name in ("data", "forward_backward", "comm_exposed", "optimizer")} == {6}
        assert counts["checkpoint"] == 2, "after steps 2 and 4; the last save comes after the last report"
        assert timings["checkpoint_stall"].count == timings["checkpoint_write"].count == 3
        spent = math.fsum(timings[name].sum for name in STEP_PHASES)
        assert seconds <= spent <= 1.5 * seconds + 0.5, "5 of the 6 steps lie between the first and the last call"
        assert timings["data"].sum >= 0.9 * 6 * 2 * 0.01, "a virtual machine's clocks go at different speeds"
        assert timings["forward_backward"].sum >= 0.9 * 6 * 2 * 0.02
        assert report.samples_total == 48
        assert report.tokens_total == 48
        assert report.weights_bytes == report.gradients_bytes == 4 * numbers
        assert report.optimizer_bytes == pytest.approx(8 * numbers, rel=0.01)
        assert (report.activations_bytes, report.device_peak_bytes) == (-1, -1)
        assert report.comm_bytes_total == 6 * 4 * numbers, "gradients once a step, whatever the micro-steps"
        assert report.bus_bandwidth > 0
        assert report.comm_exposed_seconds_total <= report.comm_seconds_total + 0.05
