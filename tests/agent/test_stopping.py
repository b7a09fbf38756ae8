"""Agents that are asked to save, to leave or to reopen their logs."""

from __future__ import annotations

import fcntl
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.quick import FOREVER, PAIR, TRAINER
from tests.support.job import Job, running, wait_for, write


def test_usr1_saves_and_term_drains_at_a_step_boundary_and_the_next_start_goes_on_from_there(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, *FOREVER) as job:
        job.wait_step(5)
        job.signal(signal.SIGUSR1)
        saved = job.wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 5)["checkpoint"]["disk_step"]
        job.wait_step(saved + 5)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    stopped_at = int((tmp_path / "state").read_text())
    assert stopped_at >= saved + 5
    told = re.search(r"the job has drained, step (\d+) is committed", job.output)
    assert told is not None
    assert int(told[1]) >= stopped_at  # this script's ranks agree on nothing: each has a step of its own
    with running(tmp_path, *PAIR, "--usr1", "drain", *FOREVER) as job:
        assert job.wait_step(stopped_at + 1)["base_step"] == stopped_at
        job.signal(signal.SIGUSR1)  # it can mean a drain, too
        assert job.wait() == 143, job.output
    assert int((tmp_path / "state").read_text()) > stopped_at
    assert list((tmp_path / "run").iterdir()) == []


def test_a_drain_that_could_not_save_is_exit_5(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, *FOREVER, "drain-unsaved") as job:
        job.wait_step(5)
        job.signal(signal.SIGTERM)
        assert job.wait() == 5, job.output
    assert re.search(r"stopped at step \d+, and (step \d+ is the newest that|nothing) (is|was) committed", job.output)


@pytest.mark.parametrize(("how", "code"), [("", 143), ("drain-unsaved", 5)])
def test_who_waits_for_a_drain_is_told_how_the_agent_has_ended(tmp_path: Path, how: str, code: int) -> None:
    with running(tmp_path, *PAIR, *FOREVER, *([how] if how else [])) as job:
        job.wait_step(5)
        command = [sys.executable, "-m", "elastic", "drain", "--wait"]
        done = subprocess.run(command, env=job.environ, capture_output=True, text=True, timeout=60)
        assert job.wait(10) == code, job.output
    assert done.returncode == (0 if code == 143 else code), done
    assert re.search(rf"it has ended with exit code {code} at step \d+; newest committed step: \d+\n", done.stdout)


def test_workers_that_outstay_the_drain_grace_are_killed_and_the_loss_is_exit_5(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, "--drain-grace", "1", *FOREVER, "deaf") as job:
        job.wait_step(5)
        job.signal(signal.SIGTERM)
        job.wait_status(lambda s: s["state"] == "draining")
        assert job.wait(15) == 5, job.output


def test_an_interrupt_drains_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, *FOREVER, "deaf") as job:
        job.wait_step(5)
        job.signal(signal.SIGINT)
        job.wait_status(lambda s: s["state"] == "draining")
        job.signal(signal.SIGINT)
        assert job.wait(10) == 5, job.output
    assert "a second SIGINT: stopping at once, without saving" in job.output


def test_elasticd_drain_is_never_the_second_signal_however_often_it_is_said(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, "--drain-grace", "100", *FOREVER, "until-told") as job:
        job.wait_step(5)
        first, again = drain(job), drain(job)
        assert re.fullmatch(r"asked agent \d+ of job trainer_script to drain, which may take up to 100 s\n", first)
        assert re.fullmatch(r"agent \d+ of job trainer_script drains already, which may take up to \d+ s\n", again)
        job.signal(signal.SIGTERM)  # as `systemctl stop` after it: the first one
        wait_for(lambda: "received SIGTERM" in job.output)
        assert job.status()["state"] == "draining", job.output  # type: ignore[index]
        (tmp_path / "state.go").touch()
        assert job.wait() == 143, job.output
    assert re.search(r"the job has drained, step \d+ is committed", job.output)


def drain(job: Job) -> str:
    command = [sys.executable, "-m", "elastic", "drain"]
    done = subprocess.run(command, env=job.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


SAVING = """
import os, signal, time

def save(*_):
    time.sleep(0.5)
    raise SystemExit

signal.signal(signal.SIGTERM, save)
open("up-" + os.environ["RANK"], "w")
time.sleep(600)
"""


@pytest.mark.parametrize("told_by", ["a signal", "elasticd drain"])
def test_a_script_without_a_session_gets_sigterm_not_the_drain_grace_and_is_not_called_saved(
    tmp_path: Path, told_by: str
) -> None:
    write(tmp_path, "script.py", SAVING)
    with running(tmp_path, *PAIR, "--shutdown-timeout", "7", "script.py") as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        if told_by == "a signal":
            job.signal(signal.SIGTERM)
            job.wait_status(lambda s: s["state"] == "draining")
        else:
            assert re.search(r"to drain, which may take up to [67] s$", drain(job).strip())
        assert job.wait(15) == 143, job.output
        told = (
            "the job was stopped; (its script had opened no session: without one, it goes on|no session was open yet: )"
        )
        assert re.search(told, job.output), job.output


def test_quit_writes_every_workers_stacks_into_its_log_and_stops(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, "--log-dir", "logs", "-r", "3", *FOREVER) as job:
        job.wait_step(5)
        job.signal(signal.SIGQUIT)
        assert job.wait(15) == 5, job.output
    logs = [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stderr.log")]
    assert len(logs) == 2
    assert all("most recent call first" in log and "trainer_script.py" in log for log in logs)


TICKING = """
import os, time
while True:
    print("tick", flush=True)
    with open("ticks-" + os.environ["RANK"], "a") as file:
        file.write(".")
    time.sleep(0.02)
"""


def test_hup_reopens_the_logs_after_a_rotation_and_is_harmless_when_their_folder_is_gone(tmp_path: Path) -> None:
    write(tmp_path, "script.py", TICKING)

    def logs() -> list[Path]:
        return [log for log in tmp_path.glob("logs/*/attempt_0/*/stdout.log") if log.stat().st_size]

    def ticks() -> int:
        return min((tmp_path / f"ticks-{rank}").stat().st_size for rank in (0, 1))

    with running(tmp_path, *PAIR, "--log-dir", "logs", "-r", "3", "script.py") as job:
        wait_for(lambda: len(logs()) == 2)
        for log in logs():
            log.rename(log.with_suffix(".1"))
        job.signal(signal.SIGHUP)
        wait_for(lambda: len(logs()) == 2, what="new log files are written")
        shutil.rmtree(tmp_path / "logs")
        job.signal(signal.SIGHUP)
        before = ticks()
        wait_for(lambda: ticks() >= before + 50, what="the workers go on")
        assert job.wait_status(lambda s: s["workers"])["round"] == 1, job.output
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


COUNTING = """
import sys, time
for number in range(100_000):
    sys.stdout.write(f"tick {number}\\n")
    time.sleep(0.02)
"""


def test_the_console_goes_on_after_a_rotation_and_says_each_line_once(tmp_path: Path) -> None:
    write(tmp_path, "script.py", COUNTING)

    def told(local_rank: int) -> list[int]:
        return [int(number) for number in re.findall(rf"\[default{local_rank}\]:tick (\d+)\n", job.output)]

    with running(tmp_path, *PAIR, "--log-dir", "logs", "script.py", environ={"PYTHONUNBUFFERED": "1"}) as job:
        wait_for(lambda: all(len(told(rank)) > 20 for rank in (0, 1)), what="the console shows both")
        job.signal(signal.SIGHUP)  # nothing was rotated: nothing is read again
        for log in tmp_path.glob("logs/*/attempt_0/*/stdout.log"):
            log.rename(log.with_suffix(".1"))
        job.signal(signal.SIGHUP)
        wait_for(lambda: all(told(rank)[-1] > 300 for rank in (0, 1)), seconds=40.0, what="the console goes on")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    for rank in (0, 1):
        numbers = sorted(told(rank))  # the last ones of the old file may come after the first ones of the new
        assert numbers == list(range(len(numbers)))


def test_a_job_that_ends_without_its_last_step_on_disk_says_so(tmp_path: Path) -> None:
    where = ("--checkpoint-dir", "ckpt", TRAINER, "3", "0.01", "state")
    for mode, said in (("", "the job has succeeded\n"), ("end-unsaved", "its last step 3 is not saved: step 0 is the")):
        (tmp_path / "state").unlink(missing_ok=True)
        with running(tmp_path, *PAIR, *where, mode) as job:
            assert job.wait(30) == 0, job.output
        assert said in job.output


def test_a_stop_while_the_checkpoint_directory_is_waited_for_is_heard_at_once(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    with (tmp_path / "ck" / ".lock").open("w") as held, running(tmp_path, "--checkpoint-dir", "ck", *FOREVER) as job:
        fcntl.flock(held, fcntl.LOCK_EX)
        wait_for(lambda: "waiting for what the agent with pid unknown has left to end" in job.output)
        job.signal(signal.SIGTERM)
        assert job.wait(8) == 143, job.output
    assert "received SIGTERM before anything was started" in job.output
    assert list((tmp_path / "run").glob("agent-*")) == []
