"""Where wall time goes, by a clock of the test's own, and what is kept of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from elastic.metrics.goodput import Account, Goodput, Seen
from elastic.metrics.goodput_file import KeptGoodput, load, place, save
from elastic.progress import Progress
from elastic.status import JobStatus
from tests.support.job import wait_for


class Clock:
    """Says one moment after another to an account."""

    def __init__(self, account: Goodput | None = None) -> None:
        self.account = account or Goodput(Account(), down_seconds=0.0)
        self.time = 100.0

    def now(self, state: Any, *, after: float, round: int = 1, **worker: Any) -> None:
        self.time += after
        report = Progress(pid=9, round=round, **worker) if worker else None
        status = JobStatus(run_id="r", incarnation="i", node_id="n", state=state, round=round)
        self.account.note(Seen(time=self.time, status=status, worker=report))

    def seconds(self) -> dict[str, float]:
        return {kind: round(value, 6) for kind, value in self.account.ours.seconds.items() if value > 1e-9}


def test_a_start_is_split_by_the_workers_own_marks() -> None:
    clock = Clock()
    clock.now("joining", after=0)
    clock.now("starting", after=2)  # at 102
    clock.now(
        "running", after=10, in_loop=1, restore_began_at=105.0, restore_ended_at=108.0, first_step_at=111.0, step=4
    )
    assert clock.seconds() == {"rendezvous": 2, "restore": 3, "start": 6, "steps": 1}


def test_a_save_that_stalls_training_is_no_step() -> None:
    clock = Clock()
    clock.now("running", after=0, in_loop=1, first_step_at=90.0, step=1)
    clock.now("running", after=5, in_loop=1, first_step_at=90.0, step=3, checkpoint_stall_seconds_total=1.5)
    assert clock.seconds() == {"checkpoint": 1.5, "steps": 3.5}


def test_steps_that_were_run_before_count_as_repeated_in_proportion() -> None:
    clock = Clock()
    clock.now("running", after=0, in_loop=1, first_step_at=90.0, step=0)
    clock.now("running", after=10, in_loop=1, first_step_at=90.0, step=10)
    clock.now("stopped", after=0, round=1)
    clock.now("starting", after=1, round=2)
    clock.now("running", after=0, round=2, in_loop=1, base_step=4, step=4, first_step_at=111.0)
    clock.now("running", after=12, round=2, in_loop=1, base_step=4, step=16, first_step_at=111.0)
    assert clock.seconds() == {"steps": 16, "rendezvous": 1, "repeated": 6}
    assert clock.account.whole.ratio == pytest.approx(16 / 23)


def test_waiting_draining_and_scripts_without_a_session_are_named() -> None:
    clock = Clock()
    clock.now("waiting", after=0)
    clock.now("spare", after=3)
    clock.now("running", after=4)
    clock.now("draining", after=5)
    clock.now("closed", after=6)
    clock.now("closed", after=100)
    assert clock.seconds() == {"waiting": 7, "steps": 5, "drain": 6}


def test_every_second_is_accounted_for_once() -> None:
    clock = Clock()
    states = ("joining", "starting", "running", "running", "stopped", "starting", "running", "draining")
    for number, state in enumerate(states):
        in_loop = {"in_loop": 1, "step": number, "first_step_at": 103.3} if state == "running" else {}
        clock.now(state, after=1.5, round=1 + (number > 4), **in_loop)
    assert math.fsum(clock.seconds().values()) == pytest.approx(1.5 * (len(states) - 1))


def test_before_any_time_the_ratio_is_not_known() -> None:
    assert math.isnan(Goodput(Account(), down_seconds=0.0).whole.ratio)


def test_the_next_agent_goes_on_with_the_account_and_counts_what_nobody_did(tmp_path: Path) -> None:
    path = tmp_path / ".goodput-x.json"
    clock = Clock()
    clock.now("running", after=0)
    clock.now("running", after=10)
    save(path, clock.account.whole, 1000.0, is_closed=False)
    account, gap = load(path, 1030.0)
    assert (account.seconds["steps"], gap) == (10, 30)
    successor = Clock(Goodput(account, down_seconds=gap))
    successor.now("running", after=0)
    successor.now("running", after=20)
    assert successor.account.whole.ratio == pytest.approx(0.5)
    assert successor.seconds() == {"down": 30, "steps": 20}


def test_the_time_between_two_runs_of_a_job_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    save(path, Account(), 1000.0, is_closed=True)
    assert load(path, 5000.0)[1] == 0.0
    save(path, Account(), 9000.0, is_closed=False)
    assert load(path, 5000.0)[1] == 0.0, "a clock that was set back is no negative time"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"seconds": {"steps": -1}, "closed": true}', '{"seconds": {"steps": NaN}, "closed": true}'],
)
def test_an_account_that_is_damaged_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "kept.json").write_text(text)
    assert load(tmp_path / "kept.json", 10.0) == (Account(), 0.0)


def test_it_is_written_now_and_then_and_when_closed_and_a_lost_directory_is_no_trouble(tmp_path: Path) -> None:
    path = place(str(tmp_path), "job/1", "node a")
    assert path is not None
    assert path.parent == tmp_path
    kept = KeptGoodput(path, save_seconds=0.01)
    wait_for(path.exists, seconds=10.0, what="the account is written")
    clock = Clock(kept.account)
    clock.now("running", after=0)
    clock.now("running", after=4)
    kept.close()
    assert json.loads(path.read_text())["seconds"]["steps"] == 4
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    gone = KeptGoodput(tmp_path / "gone" / "kept.json", save_seconds=0.01)
    gone.close()


def test_an_object_store_or_no_directory_keeps_nothing() -> None:
    assert place(None, "r", "n") is None
    assert place("s3://bucket/x", "r", "n") is None
