"""Agents that are killed, frozen or meet another: nothing of them is left in the way, and the next one trains."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.job import running, wait_for, wardens, write

TRAINER = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2", "--shutdown-timeout", "1")


ORPHANS = """
import os, subprocess, sys, time
if os.environ["RANK"] == "0":
    busy = [sys.executable, "-c", "while True: pass"]
    subprocess.Popen(busy)
    subprocess.Popen(busy, start_new_session=True)
    bare = {"JOB_TEST_MARK": os.environ["JOB_TEST_MARK"]}  # the test's mark, not the agent's nonce
    subprocess.Popen(busy, start_new_session=True, env=bare)
open("up-" + os.environ["RANK"], "w")
time.sleep(60)
"""


def test_nothing_outlives_a_killed_agent_but_bystanders(tmp_path: Path) -> None:
    write(tmp_path, "script.py", ORPHANS)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with running(tmp_path, *QUICK, "script.py") as job:
            wait_for(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
            assert len(job.processes()) >= 6
            job.signal(signal.SIGKILL)
            wait_for(lambda: not job.processes(), seconds=10.0, what="no process of the job is left")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_killed_agents_leave_is_gone_before_the_next_one_trains(tmp_path: Path) -> None:
    args = (*QUICK, "--checkpoint-dir", "ckpt", TRAINER, "100000", "0.02", "state")
    with running(tmp_path, *args) as first:
        first.wait_step(3)
        first.signal(signal.SIGUSR1)
        saved = first.wait_status(lambda s: s["checkpoint"]["disk_step"])["checkpoint"]["disk_step"]
        first.signal(signal.SIGKILL)
        with running(tmp_path, *args) as second:
            second.wait_step(saved + 2)
            assert not first.processes()
            assert not (tmp_path / "run" / f"agent-{first.process.pid}").exists()
            (warden,) = wardens(second.process.pid)  # together with its warden there is nobody to clear up
            os.kill(warden, signal.SIGSTOP)
            second.signal(signal.SIGKILL)
            os.kill(warden, signal.SIGKILL)
            with running(tmp_path, *args) as third:
                third.wait_step(saved + 2)
                assert not second.processes()
                (warden,) = wardens(third.process.pid)  # it stands still, and holds the checkpoints for the dead
                os.kill(warden, signal.SIGSTOP)
                third.signal(signal.SIGKILL)
                with running(tmp_path, *args) as fourth:
                    fourth.wait_step(saved + 2)
                    assert not third.processes()
                    assert f"the warden (pid {warden}) of the killed agent stands still: it is killed" in fourth.output
                    fourth.signal(signal.SIGTERM)
                    assert fourth.wait() == 143, fourth.output


def test_a_frozen_agents_workers_are_gone_and_it_goes_on_after_the_thaw(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--max-restarts", "0", TRAINER, "100000", "0.02", "state") as job:
        status = job.wait_step(3)
        workers = {worker["pid"] for worker in status["workers"]}
        job.signal(signal.SIGSTOP)
        wait_for(lambda: not workers & job.processes(), seconds=10.0, what="the warden has killed the workers")
        job.signal(signal.SIGCONT)
        thawed = job.wait_status(lambda s: s["round"] == 2 and s["state"] == "running")
        assert thawed["restarts"]["used"] == 0, "a freeze is not the job's failure"
        assert "did not run for" in job.output
        job.signal(signal.SIGTERM)
        assert job.wait() == 143


def test_a_freeze_at_any_moment_is_no_failure_and_no_late_sweep_hits_the_next_round(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import time; time.sleep(600)")
    with running(tmp_path, *QUICK, "--max-restarts", "0", "script.py") as job:
        for freeze in range(1, 5):
            status = job.wait_status(lambda s, n=freeze: s["round"] == n and s["workers"])
            workers = {worker["pid"] for worker in status["workers"]}
            job.signal(signal.SIGSTOP)
            wait_for(lambda gone=workers: not gone & job.processes(), seconds=10.0, what="all are killed")
            job.signal(signal.SIGCONT)  # the warden is still looking whether anything is left
        assert job.wait_status(lambda s: s["round"] == 5 and s["state"] == "running")["restarts"]["used"] == 0
        assert re.search("rank 0 has ended: (SIGKILL|stopped by the agent)", job.output)
        assert "rank 0 killed" not in job.output


def test_a_killed_warden_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(3)
        (first,) = wardens(job.process.pid)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: wardens(job.process.pid) not in ([], [first]), what="another warden")
        job.signal(signal.SIGKILL)
        wait_for(lambda: not job.processes(), seconds=10.0)


def test_a_kernel_without_pidfds_makes_no_difference(tmp_path: Path) -> None:
    old_kernel = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "old_kernel")}
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state", environ=old_kernel) as job:
        pid = job.wait_step(3)["workers"][1]["pid"]
        (warden,) = wardens(job.process.pid)
        os.kill(warden, signal.SIGKILL)
        wait_for(lambda: wardens(job.process.pid) not in ([], [warden]), what="another warden")
        os.kill(pid, signal.SIGKILL)
        status = job.wait_status(lambda s: s["round"] == 2 and s["state"] == "running")
        assert status["last_failure"]["signal"] == "SIGKILL"
        done = subprocess.run(
            [sys.executable, "-m", "elastic", "drain"],
            env={**job.environ, **old_kernel},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert job.wait() == 143, job.output


def test_a_removed_runtime_folder_is_made_again(tmp_path: Path) -> None:
    """A logout removes /run/user, a cleaner what is old in /tmp."""
    with running(tmp_path, *QUICK, "--log-dir", "logs", TRAINER, "100000", "0.02", "state") as job:
        pid = job.wait_step(3)["workers"][0]["pid"]
        shutil.rmtree(tmp_path / "run" / f"agent-{job.process.pid}")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: "round 2: training" in job.output, seconds=30.0, what="the next round")
        assert "cannot start" not in job.output


def test_orphans_of_a_running_script_do_not_stay_zombies(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os, time; [os.system('(true &)') for _ in range(20)]; time.sleep(600)")
    with running(tmp_path, *QUICK, "script.py") as job:
        job.wait_status(lambda s: s["workers"])
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")

        def zombies() -> list[int]:
            pids = map(int, children.read_text().split())
            return [pid for pid in pids if not os.path.exists(f"/proc/{pid}/exe")]  # noqa: PTH110 - may go meanwhile

        wait_for(zombies, seconds=20.0, what="orphans")
        wait_for(lambda: not zombies(), seconds=20.0, what="they are reaped")
        assert job.status() is not None


def test_two_jobs_on_one_host_do_not_disturb_each_other(tmp_path: Path) -> None:
    defaults = ("--nproc-per-node", "1", TRAINER, "100000", "0.02")
    with running(tmp_path, *defaults, "one") as one, running(tmp_path, *defaults, "two") as two:
        one.wait_step(3)
        two.wait_step(3)
        for job in (one, two):
            job.signal(signal.SIGTERM)
        assert (one.wait(), two.wait()) == (143, 143)


def test_a_checkpoint_directory_in_use_is_refused_by_whatever_path_and_names_its_user(tmp_path: Path) -> None:
    args = (*QUICK, "--checkpoint-dir", "ckpt", TRAINER, "100000", "0.02", "state")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("ckpt")
    with running(tmp_path, *args) as job:
        job.wait_step(3)
        by_link = (*QUICK, "--checkpoint-dir", str(tmp_path / "link"), TRAINER, "9", "0.01", "state")
        with running(tmp_path, *args) as same, running(tmp_path / "elsewhere", *by_link) as other:
            for refused in (same, other):
                assert refused.wait() == 2, refused.output
                assert re.search(rf"in use by the agent with pid {job.process.pid}\b", refused.output)
            assert "ckpt" in same.output
        job.signal(signal.SIGTERM)
        assert job.wait() == 143


SOCKETS = """
import os, signal
from multiprocessing import connection, util
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    listener = connection.Listener()  # as a data loader's processes have one to hand tensors over
    assert os.path.exists(listener.address), listener.address
    os.write(1, f"{util.get_temp_dir()}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_leaves_no_socket_of_its_loaders_behind(tmp_path: Path) -> None:
    write(tmp_path, "script.py", SOCKETS)
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # short, as a service's is
        run, tmp = Path(place, "run"), Path(place, "tmp")
        run.mkdir(mode=0o700)
        tmp.mkdir()
        environ = {"TMPDIR": str(tmp), "RUNTIME_DIRECTORY": str(run)}
        with running(tmp_path, "--http", "127.0.0.1:0", "script.py", environ=environ) as job:
            assert job.wait() == 0, job.output
            (folder,) = re.findall(r"^(/\S+)$", job.output, re.MULTILINE)
        assert Path(folder).is_relative_to(run)
        assert not Path(folder).exists()
        assert [path.name for path in tmp.iterdir() if path.name.startswith("pymp-")] == []
