"""Scripts, users and hosts that do what nobody should: the agent names it, or is bored by it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.agent.guard import Guard
from elastic.agent.mailbox import Mailbox, Readable
from tests.support.job import marked, run_to_end, running, wait_for, write

TRAINER = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--shutdown-timeout", "1")


def test_what_a_script_leaves_open_is_written(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "kept = open('result', 'w')\nkept.write('precious')\nraise SystemExit(0)")
    code, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert code == 0, output
    assert (tmp_path / "result").read_text() == "precious"


@pytest.mark.parametrize(
    "text", ["", '{"mess', "null", '{"message": {"message": " ", "extraInfo": null}}', "[" * 50_000]
)
def test_a_damaged_error_file_is_no_obstacle_to_the_next_round(tmp_path: Path, text: str) -> None:
    write(tmp_path, "damage", text)
    write(
        tmp_path,
        "script.py",
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(open('damage').read())\n    os._exit(3)",
    )
    code, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert code == 0, output
    assert "exited with 3" in output or "rank 0 exited" in output


@pytest.mark.parametrize("damage", ["os.truncate(path, 0)", "os.unlink(path)", "os.truncate(path, 100)"])
def test_a_worker_may_do_anything_to_its_block(tmp_path: Path, damage: str) -> None:
    write(tmp_path, "script.py", f"import os, time\npath = os.environ['ELASTICD_PROGRESS']\n{damage}\ntime.sleep(1)")
    with running(tmp_path, *QUICK, "script.py") as job:
        assert job.wait() == 0, job.output


def test_a_worker_with_an_unknown_outcome_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import os\nfrom pathlib import Path\nfrom elastic.progress import ProgressWriter\n"
        "ProgressWriter(Path(os.environ['ELASTICD_PROGRESS'])).update(outcome=9, phase=77)",
    )
    assert run_to_end(tmp_path, *QUICK, "script.py")[0] == 0


def test_a_process_of_a_worker_does_not_speak_for_it(tmp_path: Path) -> None:
    write(tmp_path, "helper.py", "import elastic\nelastic.session().report(step=999)")
    write(
        tmp_path,
        "script.py",
        "import elastic, subprocess, sys, time\nelastic.session().enter_loop(step=4, base_step=4)\n"
        "subprocess.run([sys.executable, 'helper.py'], check=True)\nopen('up', 'w')\ntime.sleep(60)",
    )
    with running(tmp_path, *QUICK, "script.py") as job:
        wait_for((tmp_path / "up").exists, seconds=60)
        status = job.status()
        assert status is not None
        assert status["workers"][0]["step"] == 4


def test_a_job_inside_a_worker_inherits_nothing_of_the_outer_one(tmp_path: Path) -> None:
    write(tmp_path, "inner.py", "import os\nprint('inner has', sorted(k for k in os.environ if 'CHECKPOINT' in k))")
    inner = [sys.executable, "-m", "elastic", "run", "--http", "127.0.0.1:0", "inner.py"]
    write(tmp_path, "outer.py", f"import subprocess\nsubprocess.run({inner!r}, check=True)")
    code, output = run_to_end(tmp_path, *QUICK, "--checkpoint-dir", "ckpt", "outer.py")
    assert code == 0, output
    assert "inner has []" in output


def test_a_child_with_an_environment_and_session_of_its_own_does_not_outlive_the_round(tmp_path: Path) -> None:
    mark = f"JOB_TEST_MARK={tmp_path.name}"
    write(
        tmp_path,
        "script.py",
        f"import subprocess, time\nsubprocess.Popen(['sleep', '987'], env=dict([{mark!r}.split('=')]), "
        "start_new_session=True)\ntime.sleep(0.5)",
    )
    try:
        code, output = run_to_end(tmp_path, *QUICK, "script.py")
        assert code == 0, output
        assert not marked(tmp_path.name)
    finally:
        for pid in marked(tmp_path.name):
            os.kill(pid, signal.SIGKILL)


def warden_of(agent: int) -> int:
    found = subprocess.run(["pgrep", "-P", str(agent), "-f", "warden.py"], capture_output=True, text=True, check=False)
    return int(found.stdout.split()[0])


def test_what_agent_and_warden_killed_at_once_leave_is_gone_before_the_next_agent_trains(tmp_path: Path) -> None:
    args = (*QUICK, "--nproc-per-node", "2", TRAINER, "100000", "0.02", "state")
    with running(tmp_path, *args) as job:
        job.wait_step(3)
        warden = warden_of(job.process.pid)
        os.kill(warden, signal.SIGSTOP)
        job.signal(signal.SIGKILL)
        os.kill(warden, signal.SIGKILL)
        with running(tmp_path, *args) as again:
            again.wait_step(3)
            assert not job.processes()
            again.signal(signal.SIGTERM)
            assert again.wait() == 143, again.output


def test_a_warden_that_does_not_listen_is_replaced() -> None:
    mailbox = Mailbox()
    guard = Guard(mailbox, "0" * 32, ())
    guard.start()
    try:
        (stopped,) = guard.pids
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(100):  # far more than a pipe holds
            guard.cover(list(range(100_000, 101_000)))
        ended = wait_for(lambda: mailbox.wait(time.monotonic() + 0.1), seconds=10.0)
        assert ended == [Readable("warden")]
        guard.cover([])
        guard.replace()
        assert guard.pids != frozenset({stopped})
    finally:
        guard.close()
        mailbox.close()


def test_a_log_reader_that_stops_reading_does_not_stop_the_job(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    (tmp_path / "run").mkdir(mode=0o700)
    write(tmp_path, "script.py", "open('ran', 'w')")
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic", "run", *QUICK, "script.py"],
        env={**os.environ, "RUNTIME_DIRECTORY": str(tmp_path / "run")},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=writing,
        start_new_session=True,
    )
    try:
        assert process.wait(60) == 0
        assert (tmp_path / "ran").exists()
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


def test_closed_standard_streams_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    write(tmp_path, "script.py", "open('ran', 'w')")
    command = f"exec {sys.executable} -m elastic run {' '.join(QUICK)} script.py >&- 2>&- <&-"
    environ = {**os.environ, "RUNTIME_DIRECTORY": str(tmp_path / "run")}
    assert subprocess.run(["sh", "-c", command], env=environ, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "ran").exists()


def test_hup_without_a_log_folder_leaves_training_alone(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--log-dir", "logs", "-r", "3", TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(3)
        shutil.rmtree(tmp_path / "logs")
        job.signal(signal.SIGHUP)
        step = job.wait_status(lambda s: s["workers"])["workers"][0]["step"]
        status = job.wait_step(step + 20)
        assert status["round"] == 1, job.output
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


def test_one_directory_by_two_paths_and_runtime_directories_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "elsewhere").mkdir()
    with running(tmp_path, *QUICK, "--checkpoint-dir", "real", TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(3)
        link = str(tmp_path / "link")
        code, output = run_to_end(tmp_path / "elsewhere", *QUICK, "--checkpoint-dir", link, TRAINER, "9", "0.01", "s")
        assert code == 2, output
        assert re.search(rf"in use by the agent with pid {job.process.pid}\b", output)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


def test_a_script_without_a_session_that_is_stopped_is_not_called_saved(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import time; open('up', 'w'); time.sleep(60)")
    with running(tmp_path, *QUICK, "script.py") as job:
        wait_for((tmp_path / "up").exists)
        job.signal(signal.SIGTERM)
        assert job.wait(15) == 143, job.output
        assert "only they know what they have saved" in job.output
