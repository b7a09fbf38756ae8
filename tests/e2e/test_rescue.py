"""A job that ends for good, or whose agent is killed, loses no step that memory holds: it is saved to go on from."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.manifest import step_name
from elastic.demo.ledger import audit, planned_steps, read_ledger
from tests.support.job import Job, run_to_end, running, wait_for, wardens, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).parents[1] / "support" / "training_script.py")
AGENT = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--memory-every", "1")
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
    slow = write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path)) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 3)
        os.kill(status["workers"][0]["pid"], signal.SIGKILL)
        assert job.wait(20) == 1, job.output
        output = job.output
    slow.unlink()
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


def http_code(job: Job, path: str) -> int:
    (port,) = re.findall(r"status at http://127.0.0.1:(\d+)/", job.output)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return int(answer.status)


def test_what_goes_on_without_agent_and_warden_is_in_nobodys_way_and_nobody_frees_its_memory(
    tmp_path: Path, undisturbed: str
) -> None:
    """Both are killed at once. Directory and memory stay the workers' until a start comes that knows whose they are."""
    slow = write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path), standby=True) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 3 and s["workers"][0]["standby"])
        os.kill(status["workers"][0]["pid"], signal.SIGSTOP)  # else it would train on, and soon to its end
        (warden,) = wardens(job.process.pid)
        os.kill(warden, signal.SIGSTOP)
        job.signal(signal.SIGKILL)
        os.kill(warden, signal.SIGKILL)
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        elsewhere = {"RUNTIME_DIRECTORY": str(tmp_path / "elsewhere")}
        code, output = run_to_end(tmp_path, *arguments(tmp_path), environ=elsewhere)
        assert code == 2, output
        told = re.search(r"kept is in use by what the agent with pid \d+, which is gone, .*`kill -9 ([\d ]+)`", output)
        assert told is not None, output
        assert {int(pid) for pid in told[1].split()} <= job.processes()
        (held,) = (tmp_path / "shm").iterdir()
        write(tmp_path, "another.py", "")
        assert run_to_end(tmp_path, *AGENT[:4], str(tmp_path / "another.py"), environ=elsewhere)[0] == 0
        assert list(held.glob("rank-*-slot-*")), "another job leaves it alone as well"
        assert status["workers"][0]["pid"] in job.processes()
        slow.unlink()
        code, output = run_to_end(tmp_path, *arguments(tmp_path), seconds=120)
        assert code == 0, output
        assert not job.processes()
        saved = re.search(r"step (\d+), which memory alone held, is saved", output)
        assert saved is not None, job.output + output
    assert first_step(tmp_path, round_=2) == int(saved[1]) + 1
    assert not list((tmp_path / "shm").iterdir())
    assert (tmp_path / "digest").read_text() == undisturbed


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """The checkpoint directory as a file system of its own."""
    kept = folder / "kept"
    kept.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(kept)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small tmpfs needs the right to mount")
    try:
        yield kept
    finally:
        subprocess.run(["umount", str(kept)], check=True)


def fails_on_a_full_disk(kept: Path, job: Job) -> int:
    """The job has failed for good, and there is no room for what memory holds. The step that it held before."""
    status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
    with contextlib.suppress(OSError), (kept / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.kill(status["workers"][0]["pid"], signal.SIGKILL)
    wait_for(lambda: "could not be saved: [Errno 28]" in job.output, what="the agent's end")
    return int(status["checkpoint"]["memory_step"])


def test_while_it_is_tried_the_agent_answers_and_a_disk_that_has_room_again_gets_it(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    with small_disk(tmp_path) as kept, running(tmp_path, *arguments(tmp_path)) as job:
        step = fails_on_a_full_disk(kept, job)
        deadline = time.monotonic() + 3 * 2  # several lease ttls
        while time.monotonic() < deadline:
            assert http_code(job, "/healthz") == 200
            time.sleep(0.5)
        job.signal(signal.SIGTERM)
        wait_for(lambda: "received SIGTERM" in job.output)
        assert job.process.poll() is None
        (kept / "filler").unlink()
        assert job.wait(20) == 1
        assert committed(tmp_path)[-1] >= step


def test_the_second_term_gives_it_up(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    with small_disk(tmp_path) as kept, running(tmp_path, *arguments(tmp_path)) as job:
        fails_on_a_full_disk(kept, job)
        job.signal(signal.SIGTERM)
        wait_for(lambda: "received SIGTERM" in job.output)
        job.signal(signal.SIGTERM)
        assert job.wait(10) == 1
        assert re.search(r"step \d+, which memory alone holds, is given up", job.output)
        assert committed(tmp_path) == []
    assert not list((tmp_path / "shm").iterdir())


def test_what_finds_no_room_within_the_drain_grace_is_kept_for_the_next_start(tmp_path: Path, undisturbed: str) -> None:
    slow = write(tmp_path, "slow", "")
    with small_disk(tmp_path) as kept:
        with running(tmp_path, *arguments(tmp_path, "--drain-grace", "2")) as job:
            step = fails_on_a_full_disk(kept, job)
            assert job.wait(20) == 1
            (folder,) = (tmp_path / "shm").iterdir()
            assert f"stays in {folder}" in job.output
        slow.unlink()
        (kept / "filler").unlink()
        without = [
            word for word in arguments(tmp_path, "--no-memory-checkpoints") if word not in ("--memory-every", "1")
        ]
        code, output = run_to_end(tmp_path, *without, seconds=120)
        assert code == 0, output
        assert "this start goes on from what is on disk" not in output
        assert first_step(tmp_path, round_=2) > step
    assert not list((tmp_path / "shm").iterdir())
    assert (tmp_path / "digest").read_text() == undisturbed


def test_a_start_that_finds_no_room_for_it_goes_on_from_it_in_memory(tmp_path: Path, undisturbed: str) -> None:
    """Once more after that start has failed as well, before it has kept anything of its own."""
    slow = write(tmp_path, "slow", "")
    *options, script, folder = arguments(tmp_path, "--drain-grace", "2", "--rdzv-id", "job")
    with small_disk(tmp_path) as kept:
        with running(tmp_path, *options, script, folder) as job:
            step = fails_on_a_full_disk(kept, job)
            assert job.wait(20) == 1
        taken_over = rf"step \d+, which memory alone holds, could not be saved to {kept}: this start goes on from it"
        broken = write(tmp_path, "broken.py", "raise SystemExit('not yet')")
        code, output = run_to_end(tmp_path, *options, str(broken), seconds=60)
        assert code == 1, output
        assert re.search(taken_over, output), output
        with running(tmp_path, *options, script, folder) as job:  # and after one that nobody lets come to a step
            wait_for(lambda: "starting ranks" in job.output, what="the workers are started")
            job.signal(signal.SIGQUIT)
            assert job.wait(20) == 143, job.output
        slow.unlink()
        with running(tmp_path, *options, script, folder) as job:
            wait_for(lambda: re.search(taken_over, job.output), what="the memory is taken over")
            job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) > step)
            (kept / "filler").unlink()
            assert job.wait(120) == 0, job.output
        assert first_step(tmp_path, round_=2) > step
        assert committed(tmp_path)[-1] == 30
    assert not list((tmp_path / "shm").iterdir())
    assert (tmp_path / "digest").read_text() == undisturbed


def test_a_start_that_is_stopped_while_it_saves_leaves_it_to_the_next(tmp_path: Path) -> None:
    slow = write(tmp_path, "slow", "")
    with small_disk(tmp_path) as kept:
        with running(tmp_path, *arguments(tmp_path)) as job:
            status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
            job.signal(signal.SIGKILL)
            job.process.wait(20)
            wait_for(lambda: not job.processes(), what="the warden has stopped the workers")
        with contextlib.suppress(OSError), (kept / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        without = arguments(tmp_path, "--no-memory-checkpoints")  # else it would go on from it in memory
        with running(tmp_path, *(word for word in without if word not in ("--memory-every", "1"))) as job:
            wait_for(lambda: "could not be saved: [Errno 28]" in job.output)
            job.signal(signal.SIGTERM)
            assert job.wait(20) == 143
        slow.unlink()
        (kept / "filler").unlink()
        code, output = run_to_end(tmp_path, *arguments(tmp_path), seconds=120)
        assert code == 0, output
        assert first_step(tmp_path, round_=2) > status["checkpoint"]["memory_step"]


LOOP = """
import sys, time, torch, elastic
from checkpoints import CheckpointManager, MemoryTier
from pathlib import Path
session = elastic.session()
torch.distributed.init_process_group("gloo")
memory = MemoryTier(session.memory_dir, local_rank=session.memory_rank, on_sealed=session.sealed)
manager = CheckpointManager(session.checkpoint_dir, rank=0, world_size=1, run_id=session.run_id,
                            incarnation=session.incarnation, round=session.round, memory=memory,
                            on_result=session.committed)
restored = manager.restore()
state = restored.state if restored else {"w": torch.zeros(1000)}
step = restored.step if restored else 0
session.restored(restored)
print(f"begins after {step}", flush=True)
session.enter_loop(step=step, base_step=step)
while step < 200:
    if len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    manager.settle()
    step += 1
    state["w"] += 1
    session.report(step=step)
    if step == 200:
        manager.save(step, state)
        result = manager.wait()
        if result is None or result.state != "committed":
            sys.exit("the last step is not saved")
    else:
        manager.keep(step, state)
manager.close()
session.finished(step=step)
"""


def test_a_program_that_ends_well_without_its_last_step_on_disk_has_it_saved_all_the_same(tmp_path: Path) -> None:
    """As README's loop: started again after its last save has failed it finds nothing left to train."""
    script, go = write(tmp_path, "loop.py", LOOP), tmp_path / "go"
    job_of = (*AGENT, "--checkpoint-dir", str(tmp_path / "kept"), "--drain-grace", "3", str(script), str(go))
    with small_disk(tmp_path) as kept:
        with running(tmp_path, *job_of) as job:
            job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
            with contextlib.suppress(OSError), (kept / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            go.touch()
            assert job.wait(60) == 5, job.output
            assert "begins after 200" in job.output
            assert "the next start on this host has the rest in memory" in job.output
        (kept / "filler").unlink()
        code, output = run_to_end(tmp_path, *job_of, seconds=60)
        assert code == 0, output
        assert committed(tmp_path) == [200]
    assert not list((tmp_path / "shm").iterdir())


def test_a_drain_that_outlasts_its_grace_leaves_the_step_to_the_next_start(tmp_path: Path) -> None:
    slow = write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path, "--drain-grace", "1")) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
        os.kill(status["workers"][0]["pid"], signal.SIGSTOP)
        job.signal(signal.SIGTERM)
        assert job.wait(20) == 5, job.output
        assert "the next start on this host has the rest in memory" in job.output
    slow.unlink()
    assert_goes_on_from(tmp_path, max(status["checkpoint"]["memory_step"], first_kept(tmp_path)))


def first_kept(folder: Path) -> int:
    """The newest step that the next start speaks of; the frozen rank may have been one further than was told."""
    entries = read_ledger((folder / "ledger").read_text()).entries
    return max(entry.step for entry in entries if not entry.closed_by)


MISTAKE = """
import sys
if "elastic" in sys.orig_argv and "run" in sys.orig_argv:
    from elastic.agent.crew import Crew
    start = Crew.start
    def fails(crew, formed, node_id):
        if formed.number > 1:
            raise RuntimeError("a mistake of ours")
        start(crew, formed, node_id)
    Crew.start = fails
"""


def test_what_ends_the_agent_itself_loses_no_step(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    write(tmp_path, "sitecustomize.py", MISTAKE)
    with running(tmp_path, *arguments(tmp_path, "--max-restarts", "3"), environ={"PYTHONPATH": str(tmp_path)}) as job:
        status = job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
        os.kill(status["workers"][0]["pid"], signal.SIGKILL)
        assert job.wait(60) == 1, job.output
    assert "RuntimeError: a mistake of ours" in job.output
    assert committed(tmp_path)[-1] >= status["checkpoint"]["memory_step"], job.output


def test_who_is_told_to_stop_at_once_does(tmp_path: Path) -> None:
    write(tmp_path, "slow", "")
    with running(tmp_path, *arguments(tmp_path)) as job:
        job.wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 2)
        job.signal(signal.SIGQUIT)
        assert job.wait(20) == 5
        assert "in memory alone" not in job.output
    assert committed(tmp_path) == []
    assert not list((tmp_path / "shm").iterdir())


def test_rounds_that_are_all_shorter_than_the_interval_still_save(tmp_path: Path) -> None:
    """Whoever fails more often than --checkpoint-every is the one who needs it."""
    write(tmp_path, "slow", "")
    every = ("--checkpoint-every", "6s", "--max-restarts", "20", "--checkpoint-dir", str(tmp_path / "kept"))
    with running(tmp_path, *AGENT, *every, SCRIPT, str(tmp_path)) as job:
        for number in range(1, 8):
            status = job.wait_status(
                lambda s, number=number: s["round"] == number and all((w["step"] or 0) > 0 for w in s["workers"])
            )
            time.sleep(3)
            if committed(tmp_path):
                break
            os.kill(status["workers"][0]["pid"], signal.SIGKILL)
        job.signal(signal.SIGQUIT)
        job.wait(20)
    assert number > 1
    assert committed(tmp_path)
