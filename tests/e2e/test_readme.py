"""The README's own loop runs as it stands: under the agent, under torchrun, and alone; drains, and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointManager
from tests.support.job import run_to_end, running, wait_for, write

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"<!-- a test runs this block -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    loop, _ = blocks()
    return write(tmp_path, "own_loop.py", loop)


def test_the_trainers_example_learns_and_is_drained_and_goes_on(tmp_path: Path) -> None:
    _, trainer = blocks()
    write(tmp_path, "sums.py", trainer)
    agent = ("--http", "127.0.0.1:0", "--checkpoint-dir", "ckpt", "--checkpoint-every", "100")
    with running(tmp_path, *agent, "--nproc-per-node", "2", "sums.py") as job:
        job.wait_step(50)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
        said = job.output
    code, output = run_to_end(tmp_path, *agent, "sums.py")
    assert code == 0, output
    losses = dict(re.findall(r"^step (\d+): loss (\S+)$", said + output, re.MULTILINE))
    assert sorted(map(int, losses)) == list(range(50, 501, 50)), said + output
    assert float(losses["500"]) < float(losses["50"])


def test_under_the_agent_it_saves_drains_and_goes_on(tmp_path: Path, script: Path) -> None:
    slow = script.read_text().replace("optimizer.zero_grad()", "optimizer.zero_grad(); __import__('time').sleep(0.01)")
    script.write_text(slow)
    agent = ("--http", "127.0.0.1:0", "--checkpoint-dir", "ckpt", "--checkpoint-every", "20")
    with running(tmp_path, *agent, "--nproc-per-node", "2", str(script)) as job:
        job.wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 20)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    with running(tmp_path, *agent, str(script)) as job:
        status = job.wait_status(lambda s: s["base_step"] is not None)
        assert status["base_step"] >= 20
        assert status["checkpoint"]["disk_step"] >= status["base_step"], "it knows what it has restored"
        assert job.wait() == 0, job.output
    assert (tmp_path / "ckpt" / "step-000000000200" / "manifest.json").exists(), "the end is kept as well"


@pytest.mark.slow
def test_a_killed_worker_is_replaced_at_the_newest_step(tmp_path: Path, script: Path) -> None:
    slow = script.read_text().replace("optimizer.zero_grad()", "optimizer.zero_grad(); __import__('time').sleep(0.05)")
    script.write_text(slow)
    agent = ("--http", "127.0.0.1:0", "--checkpoint-dir", "ckpt", "--checkpoint-every", "1000")
    with running(tmp_path, *agent, "--nproc-per-node", "2", str(script)) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 20)
        os.kill(status["workers"][1]["pid"], signal.SIGKILL)
        assert job.wait_status(lambda s: s["round"] == 2 and s["base_step"] is not None)["base_step"] >= 20
        status = job.wait_status(lambda s: s["incidents"] and s["incidents"][0]["seconds"]["total"] is not None)
        assert status["incidents"][0]["lost_steps"] <= 1
        assert None not in status["incidents"][0]["seconds"].values()
        wait_for(lambda: f"round 2: training goes on after step {status['base_step']}" in job.output)
        assert "round 1: rank 0 has ended: stopped by the agent" in job.output
        assert status["cause"] == "rank 1 killed by SIGKILL"
        assert job.wait() == 0, job.output


@pytest.mark.slow
def test_a_failure_that_comes_again_and_again_costs_no_step(tmp_path: Path, script: Path) -> None:
    """No round got beyond the step that the first has left in memory; it is on disk when the job has failed."""
    whole = script.read_text()
    fault = "optimizer.zero_grad(); step == 30 and 1 / 0"
    script.write_text(whole.replace("optimizer.zero_grad()", fault))
    agent = ("--http", "127.0.0.1:0", "--checkpoint-dir", "ckpt", "--checkpoint-every", "1000", "--max-restarts", "1")
    code, output = run_to_end(tmp_path, *agent, str(script))
    assert code == 1, output
    assert "rank 0 goes on after step 30" in output
    assert f"step 30, which memory alone held, is saved as {tmp_path}/ckpt/step-000000000030" in output
    script.write_text(whole)
    code, output = run_to_end(tmp_path, *agent, str(script))
    assert code == 0, output
    assert "goes on after step 30" in output


def test_checkpoints_that_are_all_damaged_end_the_job_at_once(tmp_path: Path, script: Path) -> None:
    folder = tmp_path / "ckpt" / "step-000000000007"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    agent = ("--http", "127.0.0.1:0", "--checkpoint-dir", "ckpt")
    code, output = run_to_end(tmp_path, *agent, str(script))
    assert code == 1, output
    assert output.count("starting ranks") == 1, "trying again would not mend them"
    assert output.count("cannot go on: ") == 1
    assert "manifest.json" in output


def test_the_checkpoint_of_another_model_ends_the_job_at_once(tmp_path: Path, script: Path) -> None:
    manager = CheckpointManager(tmp_path / "ckpt")
    manager.restore()
    manager.save(7, {"model": torch.nn.Linear(9, 1).state_dict()})
    manager.close()
    code, output = run_to_end(tmp_path, "--http", "127.0.0.1:0", "--checkpoint-dir", "ckpt", str(script))
    assert code == 1, output
    assert output.count("starting ranks") == 1, "trying again would not mend it"
    assert "model/weight (float32 [1, 9] in the checkpoint, float32 [1, 8] live)" in output
    assert "start in another directory" in output


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_without_the_agent_it_runs_too(tmp_path: Path, script: Path, launcher: tuple[str, ...]) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
