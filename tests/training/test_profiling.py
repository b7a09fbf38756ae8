"""A profile on request, as the ranks take it: the same steps on all of them, and nothing before or after."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic import profile_order, progress
from elastic.profile_order import PARTS, ProfileOrder, ProfileSummary
from elastic.progress import Phase
from elastic.training.environment import read_environment
from elastic.training.session import Session
from tests.support.ranks import run_ranks
from tests.training.worlds import make_session


def order_of(folder: Path, *, steps: int, asked: int = 1, name: str = "profile-x") -> ProfileOrder:
    return ProfileOrder(name=name, folder=str(folder), steps=steps, asked=asked)


def request(block: Path, agent: progress.ProgressReader, order: ProfileOrder) -> None:
    profile_order.write(profile_order.beside(block), order.to_json())
    agent.request_profile()


def run_step(session: Session, step: int) -> None:
    session.enter_phase(Phase.DATA)
    time.sleep(0.002)
    session.enter_phase(Phase.FORWARD_BACKWARD)
    torch.randn(8, 8) @ torch.randn(8, 8)
    pending = session.begin_agree()
    pending.wait()
    session.enter_phase(Phase.OPTIMIZER)
    session.report(step=step)


def steps_in(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep#") and e["ph"] == "X"})


def summary_of(order: ProfileOrder, rank: int) -> ProfileSummary:
    return ProfileSummary.from_json(json.loads(order.summary(rank).read_text()))


@pytest.fixture
def block(tmp_path: Path) -> Path:
    path = tmp_path / "block"
    progress.create(path)
    return path


@pytest.fixture
def session(block: Path) -> Session:
    made = Session(read_environment({"ELASTICD_PROGRESS": str(block)}))
    made.enter_loop(step=0, base_step=0)
    return made


def test_the_next_steps_are_traced_and_their_time_is_accounted_for(
    tmp_path: Path, block: Path, session: Session
) -> None:
    agent, order = progress.ProgressReader(block), order_of(tmp_path, steps=3)
    run_step(session, 1)
    request(block, agent, order)
    for step in range(2, 8):
        run_step(session, step)
    assert steps_in(order.trace(0)) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    summary = summary_of(order, 0)
    assert (summary.first_step, summary.last_step) == (3, 5)
    assert set(summary.seconds) == set(PARTS)
    assert sum(summary.seconds.values()) == pytest.approx(summary.step_seconds)
    assert 0.002 <= summary.seconds["data"] < summary.step_seconds
    told = agent.read()
    assert told is not None
    assert told.phase == Phase.OPTIMIZER, "what a profile takes to be written is over"


def test_one_after_another_can_be_taken(tmp_path: Path, block: Path, session: Session) -> None:
    agent = progress.ProgressReader(block)
    for number in (1, 2):
        order = order_of(tmp_path, steps=1, name=f"profile-{number}")
        request(block, agent, order)
        for step in range(10 * number, 10 * number + 3):
            run_step(session, step)
        assert steps_in(order.trace(0)) == [f"ProfilerStep#{10 * number + 1}"]


def test_an_order_that_cannot_be_read_or_written_is_said_and_training_goes_on(
    tmp_path: Path, block: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    agent = progress.ProgressReader(block)
    profile_order.beside(block).write_text("{")
    agent.request_profile()
    run_step(session, 1)
    assert "cannot read what is to be profiled" in caplog.text
    request(block, agent, order_of(tmp_path / "gone", steps=1))
    for step in (2, 3, 4):
        run_step(session, step)
    assert "the profile cannot be written" in caplog.text
    told = agent.read()
    assert told is not None
    assert told.step == 4


def test_a_loop_that_names_no_phases_is_traced_and_says_nothing_of_them(
    tmp_path: Path, block: Path, session: Session
) -> None:
    order = order_of(tmp_path, steps=1)
    request(block, progress.ProgressReader(block), order)
    for step in (1, 2, 3):
        session.agree()
        session.report(step=step)
    assert summary_of(order, 0).seconds == {}
    assert steps_in(order.trace(0)) == ["ProfilerStep#2"]


class QuickProfiler:
    """Stands for torch's, which takes seconds to load in each process: here it matters when it runs."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


def _rank(rank: int, world_size: int, store: Any, folder: str) -> None:
    """Rank 1 gets the order some steps after rank 0."""
    torch.profiler.profile = QuickProfiler  # type: ignore[assignment,misc]
    block = Path(folder) / f"block-{rank}"
    progress.create(block)
    session = make_session(rank, world_size, store, progress_path=str(block))
    agent = progress.ProgressReader(block)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    session.enter_loop(step=0, base_step=0)
    for step in range(1, 12):
        if step == 2 + 3 * rank:
            request(block, agent, order_of(Path(folder), steps=2, asked=2))
        run_step(session, step)
    session.leave_group()
    dist.destroy_process_group()


def test_all_ranks_profile_the_same_steps_whenever_each_was_asked(tmp_path: Path) -> None:
    run_ranks(2, _rank, str(tmp_path))
    order = order_of(tmp_path, steps=2, asked=2)
    for rank in (0, 1):
        assert order.trace(rank).exists()
        assert (summary_of(order, rank).first_step, summary_of(order, rank).last_step) == (6, 7)
