"""Scripts, users and hosts that do what nobody should: the agent names it, or is bored by it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from elastic.agent.guard import Guard
from elastic.agent.mailbox import Mailbox, Readable
from tests.agent.quick import QUICK
from tests.support.job import marked, run_to_end, running, wait_for, write


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
