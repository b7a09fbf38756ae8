"""Thirty workers killed at random moments of one run: the end is the undisturbed run's, and nothing has grown."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import Job, run_to_end, running, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 30
SEED = 11
STEPS, SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 800, 500, 8, 2
LONGEST_WAIT_SECONDS = 3.0  # between two kills: some hit workers that have just started, some while standbys warm up
AGENT = ("--http", "127.0.0.1:0", "--nproc-per-node", "2", "--max-restarts", "1000", "--memory-every", "1")
WORKER = (
    *("-m", "elastic.demo.bytelm", "--steps", str(STEPS), "--samples", str(SAMPLES), "--seed", "3"),
    *("--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(MICRO_BATCH), "--save-every", "100"),
    *("--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--device", "cpu"),
)


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    files = ("--ledger", str(folder / "ledger"), "--digest", str(folder / "digest"))
    return (*AGENT, "--checkpoint-dir", str(folder / "kept"), *WORKER, *files, *more)


def holdings(job: Job) -> dict[str, int]:
    """What a leak would make grow: of the agent, and files of its in shared memory."""
    proc = Path(f"/proc/{job.process.pid}")
    return {
        "processes": len(job.processes()),
        "descriptors": len(os.listdir(proc / "fd")),  # noqa: PTH208 - names are all we want
        "threads": len(os.listdir(proc / "task")),  # noqa: PTH208
        "shared memory": sum(1 for path in job.folder.joinpath("shm").rglob("*") if path.is_file()),
    }


def rested(job: Job) -> dict[str, int]:
    """The same, in the state that every round comes to: trained for a few steps, standbys warm."""
    first = job.status() or {}
    step = max([worker["step"] or 0 for worker in first.get("workers", [])], default=0)
    job.wait_status(
        lambda s: len(s["workers"]) == 2 and all(w["standby"] and (w["step"] or 0) > step + 3 for w in s["workers"])
    )
    return holdings(job)


def kill_one(job: Job, draw: random.Random) -> None:
    """A worker, at any moment after the round has applied a step that is new: each kill is one loss then."""
    status = job.wait_step(job_step(job) + 1)
    time.sleep(draw.uniform(0.0, LONGEST_WAIT_SECONDS))
    victim = draw.choice(status["workers"])
    os.kill(victim["pid"], signal.SIGKILL)
    before = status["round"]
    job.wait_status(lambda s: s["round"] > before and s["state"] == "running")


def job_step(job: Job) -> int:
    return max((worker["step"] or 0 for worker in (job.status() or {"workers": []})["workers"]), default=0)


def test_thirty_random_kills_cost_a_step_each_at_most_and_leave_nothing_behind(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    draw = random.Random(SEED)
    with running(killed, *arguments(killed, "--step-seconds", "0.15"), standby=True) as job:
        kill_one(job, draw)
        before = rested(job)
        for _ in range(KILLS - 1):
            kill_one(job, draw)
        after = wait_for(lambda: held if (held := rested(job)) == before else None, what=f"again {before}")
        assert job.wait(300) == 0, job.output
        repeated = [int(number) for number in re.findall(r"(\d+) steps? repeated", job.output)]
    assert after == before
    code, output = run_to_end(straight, *arguments(straight), seconds=200)
    assert code == 0, output
    assert (killed / "digest").read_text() == (straight / "digest").read_text()
    plan = planned_steps(samples=SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=3, steps=STEPS)
    found = audit(read_ledger((killed / "ledger").read_text()).entries, plan)
    assert found.is_right, found
    assert len(repeated) == KILLS
    assert max(repeated) <= 1
    assert not list((killed / "shm").iterdir())
