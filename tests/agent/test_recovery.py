"""The agent against real processes that fail, hang on, are killed or are asked to leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.job import run_to_end, running, wait_for, write

TRAINER = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2", "--shutdown-timeout", "1")

ONCE = """
import os, sys, time, signal, ctypes
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
open(f"ran-{rank}-{attempt}", "w").close()
if rank == 1 and attempt == 0:
    while not os.path.exists("ran-0-0"):
        time.sleep(0.01)
    %s
time.sleep(0.3 if attempt else 30)
"""


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("raise ValueError('boom')", "rank 1 exited: ValueError: boom"),
        ("os._exit(3)", "rank 1 exited: exited with 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 killed: killed by SIGKILL"),
        ("ctypes.string_at(0)", "rank 1 killed: killed by SIGSEGV"),
        ("import a_module_that_is_not_there", "rank 1 exited: ModuleNotFoundError"),
        ("sys.exit('done for')", "rank 1 exited: exited with 1"),
    ],
)
def test_a_failed_worker_is_named_its_peers_are_stopped_and_the_next_round_runs(
    tmp_path: Path, fault: str, named: str
) -> None:
    write(tmp_path, "script.py", ONCE % fault)
    began = time.monotonic()
    code, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert code == 0, output
    assert named in output
    assert time.monotonic() - began < 25, "rank 0 was waited for instead of stopped"
    assert sorted(p.name for p in tmp_path.glob("ran-*")) == ["ran-0-0", "ran-0-1", "ran-1-0", "ran-1-1"]


def test_the_traceback_shows_the_users_frames_only(tmp_path: Path) -> None:
    write(tmp_path, "script.py", ONCE % "raise ValueError('boom')")
    _, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert 'script.py", line 8, in <module>' in output
    assert "standby.py" not in output


def test_the_budget_is_exact_and_its_end_is_exit_1(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os; open('ran-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w'); os._exit(3)")
    code, output = run_to_end(tmp_path, *QUICK, "--max-restarts", "2", "script.py")
    assert code == 1, output
    assert sorted(p.name for p in tmp_path.glob("ran-*")) == ["ran-0", "ran-1", "ran-2"]


def test_78_is_not_retried(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import os, sys; open('ran-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w'); sys.exit(78)",
    )
    code, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert code == 78, output
    assert [p.name for p in tmp_path.glob("ran-*")] == ["ran-0"]


def test_a_worker_that_says_fatal_is_not_retried_and_ends_the_job_with_1(tmp_path: Path) -> None:
    code, output = run_to_end(tmp_path, *QUICK, TRAINER, "50", "0.05", "state", "fatal")
    assert code == 1, output
    assert "round 2" not in output
    assert "no use in trying again" in output


def test_a_peer_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit(0)
time.sleep(0.5)
if os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(60)
""",
    )
    began = time.monotonic()
    code, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert code == 0, output
    assert time.monotonic() - began < 20


def test_a_killed_worker_costs_a_round_and_the_incident_adds_up(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "60", "0.05", "state", "kill-once") as job:
        status = job.wait_status(lambda s: s["incidents"] and s["incidents"][0]["seconds"]["total"])
        assert job.wait() == 0, job.output
    (incident,) = status["incidents"]
    seconds = incident["seconds"]
    phases = [seconds[name] for name in ("detect", "stop", "rendezvous", "start", "restore", "first_step")]
    assert sum(phases) == pytest.approx(seconds["total"], rel=0.05)
    assert incident["round"] == 2
    assert incident["lost_steps"] >= 2, "rank 1 had applied two steps, rank 0 at least as many, and nothing was saved"
    assert "rank 1" in incident["cause"]
    assert status["last_failure"]["signal"] == "SIGKILL"
    assert status["restarts"]["used"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_saves_at_a_step_boundary_and_the_next_start_goes_on_from_there(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(5)
        job.signal(number)
        assert job.wait() == 143, job.output
    stopped_at = int((tmp_path / "state").read_text())
    assert stopped_at >= 5
    code, output = run_to_end(tmp_path, *QUICK, TRAINER, str(stopped_at + 3), "0.02", "state")
    assert code == 0, output


def test_a_drain_that_could_not_save_is_exit_5(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state", "drain-unsaved") as job:
        job.wait_step(5)
        job.signal(signal.SIGTERM)
        assert job.wait() == 5, job.output


def test_workers_that_outstay_the_drain_grace_are_killed_and_the_loss_is_exit_5(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--drain-grace", "1", TRAINER, "100000", "0.02", "state", "deaf") as job:
        job.wait_step(5)
        job.signal(signal.SIGTERM)
        job.wait_status(lambda s: s["state"] == "draining")
        assert job.wait(15) == 5, job.output


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state", "deaf") as job:
        job.wait_step(5)
        job.signal(signal.SIGINT)
        job.wait_status(lambda s: s["state"] == "draining")
        job.signal(signal.SIGINT)
        assert job.wait(10) == 5, job.output


def test_a_script_without_a_session_gets_sigterm_not_the_drain_grace(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import time; open('up', 'w'); time.sleep(60)")
    with running(tmp_path, *QUICK, "script.py") as job:
        wait_for((tmp_path / "up").exists)
        job.signal(signal.SIGTERM)
        assert job.wait(15) == 143, job.output


def test_a_drain_before_the_workers_are_up_ends_the_job_cleanly(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state") as job:
        job.wait_status(lambda s: s["workers"])
        job.signal(signal.SIGTERM)
        assert job.wait(15) in (143, 5), job.output


def test_quit_writes_every_workers_stacks_into_its_log_and_stops(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--log-dir", "logs", "-r", "3", TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(5)
        job.signal(signal.SIGQUIT)
        assert job.wait(15) == 5, job.output
    logs = [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stderr.log")]
    assert len(logs) == 2
    assert all("most recent call first" in log and "trainer_script.py" in log for log in logs)


def test_usr1_commits_at_the_next_step_and_training_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(5)
        job.signal(signal.SIGUSR1)
        saved = job.wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 5)["checkpoint"]["disk_step"]
        job.wait_step(saved + 5)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143


def test_usr1_can_mean_drain(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--usr1", "drain", TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(5)
        job.signal(signal.SIGUSR1)
        assert job.wait() == 143


def test_hup_reopens_the_logs_after_a_rotation(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import time\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.05)")
    with running(tmp_path, *QUICK, "--log-dir", "logs", "-r", "1", "script.py") as job:
        (log,) = wait_for(lambda: [p for p in tmp_path.glob("logs/*/attempt_0/0/stdout.log") if p.stat().st_size])
        log.rename(log.with_suffix(".1"))
        job.signal(signal.SIGHUP)
        wait_for(lambda: log.exists() and log.stat().st_size, what="a new log file is written")
        job.signal(signal.SIGTERM)
        job.wait()


def test_a_restart_keeps_the_logs_of_the_attempt_before(tmp_path: Path) -> None:
    write(tmp_path, "script.py", ONCE % "print('first words', flush=True); os._exit(3)")
    code, output = run_to_end(tmp_path, *QUICK, "--log-dir", "logs", "-r", "3", "script.py")
    assert code == 0, output
    assert next(tmp_path.glob("logs/*/attempt_0/1/stdout.log")).read_text() == "first words\n"
    assert len(list(tmp_path.glob("logs/*/attempt_1/*/stdout.log"))) == 2
    assert "first words" in output, "the last lines of the failed worker are part of the report"


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


def test_a_killed_agents_job_starts_again_at_once(tmp_path: Path) -> None:
    args = (*QUICK, "--checkpoint-dir", "ckpt", TRAINER, "100000", "0.02", "state")
    with running(tmp_path, *args) as job:
        job.wait_step(3)
        job.signal(signal.SIGUSR1)
        job.wait_status(lambda s: s["checkpoint"]["disk_step"])
        job.signal(signal.SIGKILL)
        with running(tmp_path, *args) as again:
            again.wait_step(5)
            assert not job.processes()
            assert not (tmp_path / "run" / f"agent-{job.process.pid}").exists()
            again.signal(signal.SIGTERM)
            assert again.wait() == 143, again.output


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
        assert "ended with -9" in job.output
        assert "rank 0 killed" not in job.output


def test_a_killed_warden_is_replaced(tmp_path: Path) -> None:
    def wardens(parent: int) -> list[int]:
        found = subprocess.run(
            ["pgrep", "-P", str(parent), "-f", "warden.py"], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state") as job:
        job.wait_step(3)
        (first,) = wardens(job.process.pid)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: wardens(job.process.pid) not in ([], [first]), what="another warden")
        job.signal(signal.SIGKILL)
        wait_for(lambda: not job.processes(), seconds=10.0)


def test_two_jobs_on_one_host_do_not_disturb_each_other(tmp_path: Path) -> None:
    defaults = ("--nproc-per-node", "1", TRAINER, "100000", "0.02")
    with running(tmp_path, *defaults, "one") as one, running(tmp_path, *defaults, "two") as two:
        one.wait_step(3)
        two.wait_step(3)
        for job in (one, two):
            job.signal(signal.SIGTERM)
        assert (one.wait(), two.wait()) == (143, 143)


def test_a_checkpoint_directory_in_use_is_refused_and_names_its_user(tmp_path: Path) -> None:
    args = (*QUICK, "--checkpoint-dir", "ckpt", TRAINER, "100000", "0.02", "state")
    with running(tmp_path, *args) as job:
        job.wait_step(3)
        code, output = run_to_end(tmp_path, *args)
        assert code == 2, output
        assert str(job.process.pid) in output
        assert "ckpt" in output
        job.signal(signal.SIGTERM)
        assert job.wait() == 143


def test_nothing_is_left_in_the_runtime_directory(tmp_path: Path) -> None:
    code, output = run_to_end(tmp_path, *QUICK, TRAINER, "5", "0.01", "state")
    assert code == 0, output
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to become nobody")
def test_an_unprivileged_user_can_run_lose_a_worker_and_drain(tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == "root" and folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    tmp_path.chmod(0o777)
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state", "kill-once", user=65534) as job:
        job.wait_status(lambda s: s["round"] == 2 and s["state"] == "running")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
