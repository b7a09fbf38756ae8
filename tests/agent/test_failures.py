"""Workers that fail in every way: who it was is said, the others are stopped, and the job goes on or ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.agent.quick import FOREVER, PAIR, QUICK, TRAINER
from tests.support.job import run_to_end, running, wait_for, write

FAULTS = [  # what rank 1 does in one attempt after the other, and how it is told
    ("print('first words', flush=True); os._exit(3)", "rank 1 exited with 3"),
    (r"raise ValueError('boom:\n  at last')", "rank 1 exited: ValueError: boom: at last"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 killed by SIGKILL"),
    ("ctypes.string_at(0)", "rank 1 killed by SIGSEGV"),
    ("import a_module_that_is_not_there", "rank 1 exited: ModuleNotFoundError: No module named"),
    ("sys.exit('done for')", "rank 1 exited with 1"),
]
FAILING = """
import ctypes, os, pathlib, signal, sys, time
from elastic.progress import ENVIRONMENT_KEY, ProgressWriter
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ProgressWriter(pathlib.Path(os.environ[ENVIRONMENT_KEY])).update(pid=os.getpid(), step=attempt + 1)  # so: no back-off
if rank == 0 and attempt == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"ran-{rank}-{attempt}", "w").close()
while rank == 0 or not os.path.exists(f"ran-0-{attempt}"):
    time.sleep(0.01)
"""


def test_a_failure_is_named_its_peers_are_stopped_and_the_next_round_runs_until_the_budget_is_spent(
    tmp_path: Path,
) -> None:
    """Rank 0 never ends by itself, and in the first round not even by SIGTERM."""
    script = FAILING + "".join(f"if attempt == {number}:\n    {fault}\n" for number, (fault, _) in enumerate(FAULTS))
    write(tmp_path, "script.py", script)
    budget = ("--max-restarts", str(len(FAULTS) - 1), "--log-dir", "logs", "-r", "3")
    code, output = run_to_end(tmp_path, *PAIR, *budget, "script.py")
    assert code == 1, output
    last = output.strip().splitlines()[-1]
    assert (
        f"restart budget spent: {len(FAULTS)} failures within 600 s, --max-restarts is {len(FAULTS) - 1}: rank" in last
    )
    told = re.findall(r" ERROR \S+ round (\d+): (.*)", output)
    for number, (_, words) in enumerate(FAULTS):
        assert told[number][0] == str(number + 1)
        assert told[number][1].startswith(words)
    ran = sorted(p.name for p in tmp_path.glob("ran-*"))
    assert ran == sorted(f"ran-{rank}-{attempt}" for rank in (0, 1) for attempt in range(len(FAULTS)))
    assert list((tmp_path / "run").iterdir()) == []

    line = script.splitlines().index(r"    raise ValueError('boom:\n  at last')") + 1
    report = re.search(r"rank 1 exited: ValueError: boom: at last((?:\n    .*)+)", output)
    assert report is not None
    assert f'script.py", line {line}, in <module>' in report[1]
    assert "standby.py" not in report[1], "the traceback shows the user's frames only"

    assert next(tmp_path.glob("logs/*/attempt_0/1/stdout.log")).read_text() == "first words\n"
    assert len(list(tmp_path.glob(f"logs/*/attempt_{len(FAULTS) - 1}/*/stdout.log"))) == 2
    assert "first words" in output, "the last lines of the failed worker are part of the report"


HALF_IN_THE_LOOP = """
import os, time, elastic
session = elastic.session()
if session.rank == 0:
    session.enter_loop(step=0, base_step=0)
    open("in-loop", "w").close()
    time.sleep(600)
while not os.path.exists("in-loop"):
    time.sleep(0.01)
raise ValueError("broken before the loop")
"""


def test_a_worker_in_the_loop_does_not_wait_for_one_that_failed_before_it(tmp_path: Path) -> None:
    """There it takes SIGTERM for a request, which no peer will ever agree to."""
    write(tmp_path, "script.py", HALF_IN_THE_LOOP)
    late = ("--max-restarts", "0", "--shutdown-timeout", "300", "--no-standby")
    code, output = run_to_end(tmp_path, *PAIR, *late, "script.py", seconds=60)
    assert code == 1, output
    assert "broken before the loop" in output


def test_78_is_not_retried(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import os, sys; open('ran-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w'); sys.exit(78)",
    )
    code, output = run_to_end(tmp_path, *PAIR, "script.py")
    assert code == 78, output
    assert [p.name for p in tmp_path.glob("ran-*")] == ["ran-0"]


def test_a_worker_that_says_fatal_is_not_retried_and_ends_the_job_with_1(tmp_path: Path) -> None:
    code, output = run_to_end(tmp_path, *PAIR, TRAINER, "50", "0.05", "state", "fatal")
    assert code == 1, output
    assert "round 2" not in output
    assert "no use in trying again" in output


def test_a_killed_worker_costs_a_round_and_the_incident_adds_up(tmp_path: Path) -> None:
    with running(tmp_path, *PAIR, TRAINER, "60", "0.05", "state", "kill-once") as job:
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
    assert list((tmp_path / "run").iterdir()) == []


def test_rounds_that_end_right_after_their_first_step_have_recovered_each(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import elastic, os\nsession = elastic.session()\nstep = session.round\n"
        "session.enter_loop(step=step - 1, base_step=step - 1)\nsession.report(step=step)\n"
        "os._exit(3) if step < 4 else session.finished(step)",
    )
    code, output = run_to_end(tmp_path, *QUICK, "script.py")
    assert code == 0, output
    recovered = re.findall(r"round (\d): recovered in .*, (\d) steps repeated", output)
    assert recovered == [("2", "0"), ("3", "0"), ("4", "0")], output


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to become nobody")
def test_an_unprivileged_user_can_run_lose_a_worker_and_drain(tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents]:
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    tmp_path.chmod(0o777)
    with running(tmp_path, *PAIR, *FOREVER, "kill-once", user=65534) as job:
        job.wait_status(lambda s: s["round"] == 2 and s["state"] == "running")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


DAMAGED = ["", '{"mess', "null", '{"message": {"message": " ", "extraInfo": null}}', "[" * 50_000]


def test_a_damaged_error_file_is_no_obstacle_to_the_next_round(tmp_path: Path) -> None:
    for number, text in enumerate(DAMAGED):
        write(tmp_path, f"damage-{number}", text)
    write(
        tmp_path,
        "script.py",
        "import os, pathlib\nfrom elastic.progress import ENVIRONMENT_KEY, ProgressWriter\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "block = pathlib.Path(os.environ[ENVIRONMENT_KEY])\n"
        "ProgressWriter(block).update(pid=os.getpid(), step=attempt + 1)  # so: no back-off\n"
        f"if attempt < {len(DAMAGED)}:\n"
        "    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(open(f'damage-{attempt}').read())\n    os._exit(3)",
    )
    code, output = run_to_end(tmp_path, *QUICK, "--max-restarts", str(len(DAMAGED)), "script.py")
    assert code == 0, output
    assert re.findall(r" ERROR \S+ round (\d+): rank 0 exited with 3", output) == ["1", "2", "3", "4", "5"]


BLOCKS = """
import os, pathlib, time
from elastic.progress import ProgressWriter
path, rank = os.environ["ELASTICD_PROGRESS"], os.environ["LOCAL_RANK"]
if rank == "0":
    os.truncate(path, 0)
elif rank == "1":
    os.unlink(path)
elif rank == "2":
    os.truncate(path, 100)
else:
    ProgressWriter(pathlib.Path(path)).update(outcome=9, phase=77)
open(f"up-{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_a_worker_may_do_anything_to_its_block_and_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    write(tmp_path, "script.py", BLOCKS)
    with running(tmp_path, *QUICK, "--nproc-per-node", "4", "script.py") as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 4)
        job.wait_status(lambda s: len(s["workers"]) == 4)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.output
