"""Real training under the real agent, disturbed in every way we know: the end is always that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import Job, run_to_end, running, wait_for

pytestmark = pytest.mark.timeout(300)  # many cold starts in each
SCRIPT = str(Path(__file__).parents[1] / "support" / "training_script.py")
STEPS = 30
AGENT = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--checkpoint-every", "4", "--max-restarts", "20")


def arguments(folder: Path, world: int, *, faults: dict[str, str] | None = None) -> list[str]:
    agent = [*AGENT, "--nproc-per-node", str(world), "--checkpoint-dir", str(folder / "checkpoints")]
    return [*agent, SCRIPT, str(folder), *([json.dumps(faults)] if faults else [])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The digest of a run that nobody disturbs, by world size."""
    known: dict[int, str] = {}

    def digest(world: int) -> str:
        if world not in known:
            folder = tmp_path_factory.mktemp(f"undisturbed-{world}")
            code, output = run_to_end(folder, *arguments(folder, world))
            assert code == 0, output
            assert_all_samples_used(folder)
            known[world] = (folder / "digest").read_text()
        return known[world]

    return digest


def assert_all_samples_used(folder: Path) -> None:
    """Each sample of the plan was used once, in its step, whatever rounds it took."""
    plan = planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=STEPS)
    found = audit(read_ledger((folder / "ledger").read_text()).entries, plan)
    assert found.is_right, found


FAULTS = {"1": "import", "2": "step", "3": "loader", "4": "micro", "5": "segv"}


def test_every_kind_of_failing_worker_is_recovered_from_exactly(
    tmp_path: Path, undisturbed: Callable[[int], str]
) -> None:
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 2, faults=FAULTS), seconds=280)
    assert code == 0, output
    for words in (
        "rank 1 exited: ImportError: broken at import",
        "rank 1 exited: ValueError: broken at a step",
        "rank 1 killed: killed by SIGKILL",
        "cannot be read",
        "rank 1 killed: killed by SIGSEGV",
    ):
        assert words in output
    assert (tmp_path / "digest").read_text() == undisturbed(2)
    assert_all_samples_used(tmp_path)


def during_start(job: Job, _folder: Path) -> None:
    job.wait_status(lambda s: s["workers"] and s["state"] == "starting")


def during_a_step(job: Job, folder: Path) -> None:
    job.wait_status(lambda s: s["state"] == "running")
    wait_for(lambda: (folder / "now").exists() and (folder / "now").read_text() == "step")


def during_an_evaluation(job: Job, folder: Path) -> None:
    job.wait_status(lambda s: s["state"] == "running")
    (folder / "now").write_text("")
    wait_for(lambda: (folder / "now").read_text() == "evaluation")


def during_a_save(job: Job, folder: Path) -> None:
    job.wait_status(lambda s: s["state"] == "running")
    wait_for(lambda: any((folder / "checkpoints").glob(".writing-*")) if (folder / "checkpoints").exists() else False)


MOMENTS = [during_start, during_a_step, during_an_evaluation, during_a_save]


def test_drains_at_any_moment_and_goes_on_to_the_same_end(tmp_path: Path, undisturbed: Callable[[int], str]) -> None:
    """Three ranks: with more than two the order of summation depends on DDP's buckets."""
    for moment in MOMENTS:
        with running(tmp_path, *arguments(tmp_path, 3)) as job:
            moment(job, tmp_path)
            job.signal(signal.SIGTERM)
            assert job.wait() == 143, job.output
        assert not list((tmp_path / "run").glob("*.sock"))
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 3))
    assert code == 0, output
    assert (tmp_path / "digest").read_text() == undisturbed(3)
    assert_all_samples_used(tmp_path)


ENDS = [
    (during_a_step, [signal.SIGKILL]),
    (during_a_save, [signal.SIGKILL]),
    (during_an_evaluation, [signal.SIGINT, signal.SIGINT]),
    (during_start, [signal.SIGINT, signal.SIGINT]),
]


def test_the_agent_is_killed_or_stopped_at_any_moment_and_the_next_one_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: Callable[[int], str]
) -> None:
    for moment, numbers in ENDS:
        with running(tmp_path, *arguments(tmp_path, 2)) as job:
            moment(job, tmp_path)
            for number in numbers:
                job.signal(number)
            assert job.wait(20) in (5, 143, -signal.SIGKILL), job.output
            wait_for(lambda job=job: not job.processes(), seconds=10.0, what="nothing of the job is left")
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 2))
    assert code == 0, output
    assert (tmp_path / "digest").read_text() == undisturbed(2)
    assert_all_samples_used(tmp_path)


def test_another_world_size_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    with running(tmp_path, *arguments(tmp_path, 3)) as job:
        during_a_step(job, tmp_path)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 2))
    assert code == 0, output
    assert_all_samples_used(tmp_path)


def test_damaged_checkpoints_are_fallen_over_and_all_damaged_ends_the_job(tmp_path: Path) -> None:
    with running(tmp_path, *arguments(tmp_path, 2)) as job:
        job.wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 8)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    newest, *older = sorted((tmp_path / "checkpoints").glob("step-*"), reverse=True)
    flip_a_byte(next(newest.glob("shard-00001*")))
    with running(tmp_path, *arguments(tmp_path, 2)) as job:
        status = job.wait_status(lambda s: s["base_step"] is not None)
        assert status["base_step"] == int(older[0].name.removeprefix("step-"))
        assert newest.name in job.output
        job.signal(signal.SIGINT)
        job.signal(signal.SIGINT)
        job.wait()
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        (folder / "manifest.json").write_text("{")
    code, output = run_to_end(tmp_path, *arguments(tmp_path, 2))
    assert code == 1, output
    assert "round 2" not in output.rpartition("starting ranks")[0] or "NoUsableCheckpoint" in output
    assert "manifest.json" in output
    with running(tmp_path, "--allow-fresh-start", *arguments(tmp_path, 2)) as job:
        assert job.wait_status(lambda s: s["base_step"] is not None)["base_step"] == 0
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 0xFF]))


def test_other_data_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, *arguments(tmp_path, 1)) as job:
        job.wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 4)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    text = Path(SCRIPT).read_text().replace("index / SAMPLES", "index / SAMPLES + 1")
    other = tmp_path / "other.py"
    other.write_text(text)
    code, output = run_to_end(tmp_path, *[str(other) if a == SCRIPT else a for a in arguments(tmp_path, 1)])
    assert code == 1, output
    assert "DatasetChangedError" in output
