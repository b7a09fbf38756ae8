"""Workers that stand still, for every reason that we know: found, told, stacks kept, recovered from exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import run_to_end, running, wait_for, write

SUPPORT = Path(__file__).parents[1] / "support"
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2")
TIMEOUT, STEPS = 2.0, 16


HANGS = {  # fault: (what its rank was doing, a function on its stack)
    "stop": ("in forward_backward of step", "commit_fault"),
    "sleep": ("in forward_backward of step", "fall_asleep"),
    "spin": ("in data of step", "spin"),
}


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("faults", [["stop", "long"], ["sleep", "spin", "long"]])
def test_hangs_are_told_from_long_work_and_recovered_from_exactly(tmp_path: Path, faults: list[str]) -> None:
    """Rank 1 hangs once in each of the first rounds; in the last it only evaluates, saves and trains slowly."""
    with running(
        tmp_path,
        *QUICK,
        *("--hang-timeout", str(TIMEOUT), "--log-dir", str(tmp_path / "logs")),
        *("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "4"),
        str(SUPPORT / "training_script.py"),
        str(tmp_path),
        json.dumps(dict(enumerate(faults, start=1))),
        environ={"TEST_STEPS": str(STEPS)},
    ) as job:
        status = job.wait_status(
            lambda s: s["round"] == len(faults) and all(slowdowns(s)) and slowdowns(s)[-1:] > [2.0],
            seconds=150,  # each rank tells its own
        )
        assert job.wait() == 0, job.output
        output = job.output
    assert slowdowns(status)[0] == 1.0
    assert "rank 1 is slow: " in output
    hung = [line for line in output.splitlines() if " hung: no progress for " in line and "ERROR" in line]
    assert len(hung) == len(faults) - 1, output
    for number, (fault, line) in enumerate(zip(faults, hung, strict=False), start=1):
        doing, function = HANGS[fault]
        assert "rank 1 hung" in line
        assert doing in line
        assert "rank 0 waits for it" in line
        assert ("its process is stopped" in line) == (fault == "stop")
        assert function in stacks(tmp_path / "logs", number, rank=1)
        assert "backward" in stacks(tmp_path / "logs", number, rank=0), "where the other one waits is told as well"
    plan = planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=STEPS)
    found = audit(read_ledger((tmp_path / "ledger").read_text()).entries, plan)
    assert found.is_right, found


def slowdowns(status: dict[str, Any]) -> list[float]:
    return [worker["slowdown"] or 0.0 for worker in status["workers"]]


def stacks(folder: Path, round_number: int, *, rank: int) -> str:
    """What the worker has written to stderr in that round, if there are stacks in it."""
    files = [p for p in folder.rglob("stderr.log") if p.parent.name == str(rank)]
    (path,) = [p for p in files if p.parent.parent.name == f"attempt_{round_number - 1}"]
    text = path.read_text()
    assert "most recent call first" in text, f"{path}: {text}"
    return text


def test_a_stopped_worker_is_a_charged_failure_with_a_reason_and_an_incident(tmp_path: Path) -> None:
    arguments = (str(SUPPORT / "trainer_script.py"), "100000", "0.02", str(tmp_path / "state"))
    with running(tmp_path, *QUICK, "--hang-timeout", "1", *arguments) as job:
        stopped = job.wait_step(5)["workers"][1]
        os.kill(stopped["pid"], signal.SIGSTOP)
        status = job.wait_status(lambda s: s["incidents"] and s["incidents"][0]["seconds"]["total"])
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    failure, (incident,) = status["last_failure"], status["incidents"]
    assert (failure["rank"], failure["reason"]) == (stopped["rank"], "hung")
    assert f"in step {stopped['step'] + 1}" in failure["message"] or "its process is stopped" in failure["message"]
    assert incident["cause"].startswith(f"rank {stopped['rank']} hung: no progress for ")
    assert incident["round"] == status["round"] == 2
    assert incident["seconds"]["detect"] >= 1.0
    assert status["restarts"]["used"] == 1
    assert job.output.count("Current thread") == 2, "the stacks of all ranks"


def test_without_the_flag_nothing_is_looked_for(tmp_path: Path) -> None:
    arguments = (str(SUPPORT / "trainer_script.py"), "100000", "0.02", str(tmp_path / "state"))
    with running(tmp_path, *QUICK, *arguments) as job:
        pid = job.wait_step(5)["workers"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        job.wait_status(lambda s: s["workers"][1]["age_seconds"] > 2.5)
        assert job.status()["round"] == 1  # type: ignore[index]  # the agent is there
        os.kill(pid, signal.SIGCONT)


SAME_ERROR = """
import os, pathlib, time
from elastic.progress import ENVIRONMENT_KEY, ProgressWriter
rank, round_number = int(os.environ["RANK"]), int(os.environ["ELASTICD_ROUND"])
progress = ProgressWriter(pathlib.Path(os.environ[ENVIRONMENT_KEY]))
progress.update(pid=os.getpid(), rank=rank, step=3, base_step=3, in_loop=1)
for step in range(4, 100):
    time.sleep(0.02)
    if rank == 1 and step == {step}:
        raise ValueError(f"item 71 is broken ({{time.monotonic()}})")
    progress.update(step=step)
time.sleep(60)
"""


@pytest.mark.parametrize(("step", "rounds"), [("7", 3), ("7 + round_number", 6)])
def test_the_same_failure_at_the_same_step_is_tried_twice_more_and_no_longer(
    tmp_path: Path, step: str, rounds: int
) -> None:
    write(tmp_path, "script.py", SAME_ERROR.format(step=step))
    code, output = run_to_end(tmp_path, *QUICK, "--max-restarts", "5", "script.py")
    assert code == 1, output
    assert output.count("starting ranks") == rounds
    repeated = "rank 1 exited: deterministic failure at step 7: ValueError: item 71 is broken"
    assert (f"the job has failed: {repeated}" in output) == (rounds == 3)
    assert ("the same 3 times, at " in output) == (rounds == 3)


def test_an_error_of_memory_says_what_to_look_at(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "raise MemoryError()")
    with running(tmp_path, *QUICK, "--max-restarts", "0", "script.py") as job:
        assert wait_for(lambda: "look at: the host's memory" in job.output)
        assert job.wait() == 1, job.output
