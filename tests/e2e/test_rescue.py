"""A job that ends for good, or whose agent is killed, loses no step that memory holds: it is saved to go on from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.manifest import step_name, writing_name
from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import Job, run_to_end, running, wait_for, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).parents[1] / "support" / "training_script.py")
AGENT = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2", "--memory-every", "1")
NO_SAVES = ("--checkpoint-every", "1000", "--max-restarts", "0")


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return (*AGENT, *NO_SAVES, "--checkpoint-dir", str(folder / "kept"), *more, SCRIPT, str(folder))


def committed(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "kept").glob("step-*"))


def first_step(folder: Path, round_: int) -> int:
    """That was trained in that round."""
    entries = read_ledger((folder / "ledger").read_text()).entries
    return min(entry.step for entry in entries if entry.round == round_ and not entry.closed_by)


def assert_goes_on_from(folder: Path, step: int) -> None:
    """Started again it repeats nothing that it had saved, and uses every sample once."""
    code, output = run_to_end(folder, *arguments(folder), seconds=120)
    assert code == 0, output
    assert first_step(folder, round_=2) == step + 1
    plan = planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=30)
    found = audit(read_ledger((folder / "ledger").read_text()).entries, plan)
    assert found.is_right, found
    assert not list((folder / "shm").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run_to_end(folder, *arguments(folder), seconds=120)
    assert code == 0, output
    return (folder / "digest").read_text()


def test_a_job_that_has_failed_has_saved_what_memory_held(tmp_path: Path, undisturbed: str) -> None:
    code, output = run_to_end(tmp_path, *arguments(tmp_path), '{"1": "micro"}', seconds=120)
    assert code == 1, output
    (step,) = committed(tmp_path)
    assert f"step {step}, which memory alone held, is saved as {tmp_path}/kept/{step_name(step)}" in output
    assert "the job has failed" in output.splitlines()[-1]
    assert read_ledger((tmp_path / "ledger").read_text()).last_step - step <= 1
    assert_goes_on_from(tmp_path, step)
    assert (tmp_path / "digest").read_text() == undisturbed


@pytest.mark.parametrize("finder", ["the next agent", "give-back"])
def test_an_agent_that_was_killed_has_its_memory_saved_by_who_finds_it(
    tmp_path: Path, undisturbed: str, finder: str
) -> None:
    slow = write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path)) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 3)
        job.signal(signal.SIGKILL)
        job.process.wait(20)
        wait_for(lambda: not job.processes(), what="the warden has stopped the workers")
    slow.unlink()
    assert committed(tmp_path) == []
    found = ""
    if finder == "give-back":
        command = [sys.executable, "-m", "elastic", "give-back"]
        found = subprocess.run(command, env=job.environ, check=True, timeout=60, capture_output=True, text=True).stderr
        assert not list((tmp_path / "shm").iterdir())
    code, output = run_to_end(tmp_path, *arguments(tmp_path), seconds=120)
    assert code == 0, output
    (saved,) = re.findall(r"step (\d+), which memory alone held, is saved", found or output)
    assert int(saved) >= status["checkpoint"]["memory_step"]
    assert first_step(tmp_path, round_=2) == int(saved) + 1
    assert not list((tmp_path / "shm").iterdir())
    assert (tmp_path / "digest").read_text() == undisturbed


def claimed_by_another(folder: Path) -> None:
    """As if another node were about to save whatever step it may be, and took for ever."""
    for step in range(100):
        (folder / "kept" / writing_name(step, 1, "rescued")).mkdir()


def fails_and_waits(folder: Path, job: Job) -> None:
    """The job has failed for good, and waits for another node that saves what memory holds."""
    job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
    claimed_by_another(folder)
    status = job.wait_step(0)
    os.kill(status["workers"][0]["pid"], signal.SIGKILL)
    wait_for(lambda: "is in memory alone: another node" in job.output, what="the agent's end")


def test_the_second_term_gives_it_up_and_the_first_does_not(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path)) as job:
        fails_and_waits(tmp_path, job)
        job.signal(signal.SIGTERM)
        wait_for(lambda: "received SIGTERM" in job.output)
        time.sleep(1.0)  # nothing more comes of it
        assert job.process.poll() is None
        job.signal(signal.SIGTERM)
        assert job.wait(10) == 1
        assert "what memory alone holds is given up" in job.output
    assert committed(tmp_path) == []
    assert not list((tmp_path / "shm").iterdir())


def test_it_takes_no_longer_than_the_drain_grace(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path, "--drain-grace", "2")) as job:
        fails_and_waits(tmp_path, job)
        assert job.wait(20) == 1
        assert "whoever made it has not finished" in job.output or "is given up" in job.output


def test_who_is_told_to_stop_at_once_does(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path)) as job:
        job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
        job.signal(signal.SIGQUIT)
        assert job.wait(20) == 5
        assert "in memory alone" not in job.output
    assert committed(tmp_path) == []
    assert not list((tmp_path / "shm").iterdir())
