"""Real training under the real agent, disturbed in every way we know: the end is always that of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import Job, run_to_end, running, wait_for, write
from tests.support.plain import run_plainly

pytestmark = pytest.mark.timeout(300)  # many cold starts in each
SCRIPT = str(Path(__file__).parents[1] / "support" / "training_script.py")
STEPS = 30
SLOWLY = {"TEST_STEP_SECONDS": "0.05"}  # so that no moment is missed
AGENT = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--checkpoint-every", "4", "--max-restarts", "20")


def arguments(folder: Path, world: int, *, faults: dict[str, str] | None = None) -> list[str]:
    agent = [*AGENT, "--nproc-per-node", str(world), "--checkpoint-dir", str(folder / "checkpoints")]
    return [*agent, SCRIPT, str(folder), *([json.dumps(faults)] if faults else [])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave that nobody disturbs, not even an agent: digest, ledger, checkpoints of 24, 28 and 30."""
    folder = tmp_path_factory.mktemp("undisturbed")
    checkpoints = {"ELASTICD_CHECKPOINT_DIR": str(folder / "checkpoints"), "ELASTICD_CHECKPOINT_EVERY": "4"}
    run_plainly(2, SCRIPT, str(folder), environ={"ELASTICD_ROUND": "1", **checkpoints})
    assert_all_samples_used(folder)
    assert steps_kept(folder) == [24, 28, 30]
    return folder


def assert_same_end(folder: Path, undisturbed: Path) -> None:
    """Every bit of the parameters, and every sample."""
    assert (folder / "digest").read_text() == (undisturbed / "digest").read_text()
    assert_all_samples_used(folder)


def assert_all_samples_used(folder: Path) -> None:
    """Each sample of the plan was used once, in its step, whatever rounds it took."""
    plan = planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=STEPS)
    found = audit(read_ledger((folder / "ledger").read_text()).entries, plan)
    assert found.is_right, found


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def go_back(folder: Path, undisturbed: Path, step: int) -> None:
    """Make the folder what that of the undisturbed run was after this step, whose checkpoint it has kept."""
    shutil.copytree(undisturbed, folder, dirs_exist_ok=True)
    (folder / "digest").unlink()
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    lines = (folder / "ledger").read_text().splitlines(keepends=True)
    (folder / "ledger").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


FAULTS = {"1": "import", "2": "step", "3": "loader", "4": "micro", "5": "segv"}


def test_every_kind_of_failing_worker_is_recovered_from_exactly(tmp_path: Path, undisturbed: Path) -> None:
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 2, faults=FAULTS), seconds=280)
    assert code == 0, output
    for words in (
        "rank 1 exited: ImportError: broken at import",
        "rank 1 exited: ValueError: broken at a step",
        "rank 1 killed by SIGKILL",
        "cannot be read",
        "rank 1 killed by SIGSEGV",
    ):
        assert words in output
    assert_same_end(tmp_path, undisturbed)


def during_start(job: Job, _folder: Path) -> None:
    job.wait_status(lambda s: s["workers"] and s["state"] == "starting")


def during_a_step(job: Job, folder: Path) -> None:
    job.wait_status(lambda s: s["state"] == "running")
    wait_for(lambda: (folder / "now").exists() and (folder / "now").read_text() == "step", seconds=60)


def during_an_evaluation(job: Job, folder: Path) -> None:
    job.wait_status(lambda s: s["state"] == "running")
    (folder / "now").write_text("")
    wait_for(lambda: (folder / "now").read_text() == "evaluation", seconds=60)


def during_a_save(job: Job, folder: Path) -> None:
    job.wait_status(lambda s: s["state"] == "running")
    wait_for(lambda: any((folder / "checkpoints").glob(".writing-*")) if (folder / "checkpoints").exists() else False)


KILL, DRAIN, STOP_NOW = [signal.SIGKILL], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]
ENDS = [  # moment, what is sent to the agent, exit codes
    (during_start, DRAIN, {143}),
    (during_a_step, DRAIN, {143}),
    (during_an_evaluation, DRAIN, {143}),
    (during_a_save, DRAIN, {143}),
    (during_a_step, KILL, {-signal.SIGKILL}),
    (during_a_save, KILL, {-signal.SIGKILL}),
    (during_an_evaluation, STOP_NOW, {5, 143}),  # 143: the first was enough
    (during_start, STOP_NOW, {5, 143}),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_agent_is_drained_killed_or_stopped_at_any_moment_and_the_next_one_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: Path
) -> None:
    for moment, numbers, codes in ENDS:
        with running(tmp_path, *arguments(tmp_path, 2), environ=SLOWLY) as job:
            moment(job, tmp_path)
            for number in numbers:
                job.signal(number)
            assert job.wait() in codes, job.output
            wait_for(lambda job=job: not job.processes(), seconds=10.0, what="nothing of the job is left")
            assert numbers is KILL or not list((tmp_path / "run").glob("*.sock"))
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 2), seconds=120)
    assert code == 0, output
    assert_same_end(tmp_path, undisturbed)


def test_another_world_size_goes_on_with_the_same_samples(tmp_path: Path, undisturbed: Path) -> None:
    go_back(tmp_path, undisturbed, 24)
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 1), seconds=120)
    assert code == 0, output
    entries = read_ledger((tmp_path / "ledger").read_text()).entries
    assert sorted((e.step, e.rank) for e in entries if e.round > 1) == [(step, 0) for step in range(25, STEPS + 1)]
    assert_all_samples_used(tmp_path)


def test_a_damaged_checkpoint_is_fallen_over_and_all_damaged_ends_the_job(tmp_path: Path, undisturbed: Path) -> None:
    go_back(tmp_path, undisturbed, 28)
    newest = tmp_path / "checkpoints" / "step-000000000028"
    flip_a_byte(next(newest.glob("shard-00001*")))
    with running(tmp_path, *arguments(tmp_path, 2)) as job:
        assert job.wait_status(lambda s: s["base_step"] is not None)["base_step"] == 24
        assert newest.name in job.output
        job.signal(signal.SIGINT)
        job.signal(signal.SIGINT)
        job.wait()
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        (folder / "manifest.json").write_text("{")
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 1), seconds=120)
    assert code == 1, output
    assert output.count("starting ranks") == 1, "trying again would not mend them"
    assert "NoUsableCheckpoint" in output
    assert "manifest.json" in output
    with running(tmp_path, "--allow-fresh-start", *arguments(tmp_path, 1)) as job:
        assert job.wait_status(lambda s: s["base_step"] is not None)["base_step"] == 0
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


def test_a_checkpoint_directory_that_is_gone_is_waited_for_and_no_fresh_start(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "unmounted"
    refused = re.compile(r"ERROR .* step \d+ was committed in an earlier round, and there is no checkpoint now: is ")
    with running(tmp_path, "--no-memory-checkpoints", *arguments(tmp_path, 1)) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) > 0 and s["workers"])
        directory.rename(elsewhere)
        os.kill(status["workers"][0]["pid"], signal.SIGKILL)
        wait_for(lambda: refused.search(job.output), seconds=60.0, what="a fresh start is refused")
        shutil.rmtree(directory)  # the worker has made it again
        elsewhere.rename(directory)
        assert job.wait(100) == 0, job.output
    assert_all_samples_used(tmp_path)


def test_saves_that_fail_are_told_by_the_status_until_one_succeeds(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "unmounted"

    def saves(job: Job, *, failed: int) -> None:
        job.signal(signal.SIGUSR1)
        job.wait_status(lambda s: s["checkpoint"]["disk_step"] and s["checkpoint"]["failed_saves"] == failed)

    write(tmp_path, "slow", "")
    with running(
        tmp_path, "--http", "127.0.0.1:0", "--checkpoint-every", "1000", *arguments(tmp_path, 1)[len(AGENT) :]
    ) as job:
        job.wait_step(1)
        saves(job, failed=0)
        directory.rename(elsewhere)
        saves(job, failed=1)
        saves(job, failed=2)
        told = subprocess.run(
            [sys.executable, "-m", "elastic", "status"], env=job.environ, capture_output=True, text=True, timeout=60
        ).stdout
        assert re.search(r"newest committed step: \d+\n2 saves failed since: the workers' logs say why\n", told), told
        shutil.rmtree(directory, ignore_errors=True)
        elsewhere.rename(directory)
        saves(job, failed=0)


@pytest.mark.slow
def test_signals_to_every_process_of_the_job_save_and_drain_as_those_to_the_agent_do(tmp_path: Path) -> None:
    """As `systemctl kill` and SLURM send them."""
    with running(tmp_path, *arguments(tmp_path, 2)) as job:
        workers = job.wait_step(2)["workers"]
        for worker in workers:
            os.kill(worker["pid"], signal.SIGUSR1)
            os.kill(worker["pid"], signal.SIGTERM)
        second = job.wait_status(lambda s: s["round"] == 2 and s["workers"] and (s["workers"][0]["step"] or 0) > 0)
        assert (second["restarts"]["used"], second["last_failure"]) == (0, None)
        assert second["base_step"] >= 2
        for pid in [job.process.pid, *(worker["pid"] for worker in second["workers"])]:
            os.kill(pid, signal.SIGTERM)
        assert job.wait() == 143, job.output
    assert run_to_end(tmp_path, *arguments(tmp_path, 2), seconds=120)[0] == 0
    assert_all_samples_used(tmp_path)


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 0xFF]))


def test_other_data_than_the_checkpoints_is_refused(tmp_path: Path, undisturbed: Path) -> None:
    go_back(tmp_path, undisturbed, 28)
    other = write(tmp_path, "other.py", Path(SCRIPT).read_text().replace("index / SAMPLES", "index / SAMPLES + 1"))
    code, output = run_to_end(tmp_path, *[str(other) if a == SCRIPT else a for a in arguments(tmp_path, 1)])
    assert code == 1, output
    assert "DatasetChangedError" in output


@pytest.mark.slow
def test_a_profile_is_taken_without_a_restart_and_changes_no_bit(tmp_path: Path, undisturbed: Path) -> None:
    logs = ("--log-dir", str(tmp_path / "logs"))
    with running(tmp_path, *logs, *arguments(tmp_path, 2), environ=SLOWLY) as job:
        job.wait_step(3)
        command = [sys.executable, "-m", "elastic", "profile", "--steps", "4", "--json"]
        done = subprocess.run(command, env=job.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert job.wait(120) == 0, job.output
    first = {rank["first_step"] for rank in told["ranks"]}
    assert len(first) == 1, "all ranks have profiled the same steps"
    for rank in told["ranks"]:
        assert rank["last_step"] == rank["first_step"] + 3
        assert sum(rank["seconds"].values()) == pytest.approx(rank["step_seconds"])
        assert rank["seconds"]["compute"] > 0.05, "a micro-batch sleeps that long"
        assert Path(rank["trace"]).parent == tmp_path / "logs"
        events = json.loads(Path(rank["trace"]).read_text())["traceEvents"]
        steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
        assert len(steps) == 4
    assert "round 2" not in job.output
    assert_same_end(tmp_path, undisturbed)
