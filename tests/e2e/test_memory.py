"""Checkpoints in memory under the real agent: a killed worker costs one step at most, and the end is the same."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import run_to_end, running, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).parents[1] / "support" / "training_script.py")
AGENT = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2", "--memory-every", "1")


@contextlib.contextmanager
def little_memory(place: Path) -> Iterator[None]:
    """A tmpfs of one page per thing that would have to fit."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=1777", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small tmpfs needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def assert_all_samples_used(folder: Path) -> None:
    plan = planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=30)
    found = audit(read_ledger((folder / "ledger").read_text()).entries, plan)
    assert found.is_right, found


def test_killed_workers_cost_a_step_each_and_too_little_memory_costs_a_warning(tmp_path: Path) -> None:
    """The undisturbed run that the other is compared to is the one without room: it trains on."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    with little_memory(straight / "shm"):
        code, output = run_to_end(straight, *AGENT, "--checkpoint-dir", str(straight / "kept"), SCRIPT, str(straight))
    assert code == 0, output
    assert len(re.findall(r"checkpoints in memory are off: .* needs .* MB .* can be had", output)) == 2  # a rank each
    faults = '{"1": "micro", "2": "step", "3": "micro"}'
    directory = ("--checkpoint-dir", str(killed / "kept"))
    code, output = run_to_end(killed, *AGENT, *directory, SCRIPT, str(killed), faults, seconds=200)
    assert code == 0, output
    repeated = [int(number) for number in re.findall(r"(\d+) steps? repeated", output)]
    assert len(repeated) == 3, output
    assert max(repeated) <= 1, output
    assert (killed / "digest").read_text() == (straight / "digest").read_text()
    assert_all_samples_used(killed)
    assert not list((killed / "shm").iterdir())  # gone with the agent


@pytest.mark.slow
def test_memory_of_a_killed_agent_is_freed_by_the_next_one(tmp_path: Path) -> None:
    arguments = (*AGENT, "--checkpoint-dir", str(tmp_path / "kept"), SCRIPT, str(tmp_path))
    (tmp_path / "slow").touch()
    with running(tmp_path, *arguments) as job:
        job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2, seconds=60)
        (left,) = (tmp_path / "shm").iterdir()
        assert len(list(left.glob("rank-*-slot-*"))) >= 4
        job.signal(signal.SIGKILL)
        job.process.wait(20)
        wait_for(lambda: not job.processes(), what="the warden has stopped the workers")
    (tmp_path / "slow").unlink()
    code, output = run_to_end(tmp_path, *arguments, seconds=120)
    assert code == 0, output
    assert not list((tmp_path / "shm").iterdir())
    assert_all_samples_used(tmp_path)
