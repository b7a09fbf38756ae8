"""Warm standbys: what one becomes, what the pool does about bad ones, and a job that uses them."""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import standbys
from elastic.agent.child import Birth, Child, Command
from elastic.agent.mailbox import Mailbox
from elastic.agent.standbys import Standbys
from tests.support.job import Job, running, wait_for, write

TRAINER = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--shutdown-timeout", "1", "--nproc-per-node", "1")
NOBODY = 65534 if os.geteuid() == 0 and shutil.which("setpriv") else None

PROBE = """
import atexit, json, os, random, signal, sys, threading, time, warnings
came_with = sorted(name for name in ("torch", "torch._dynamo") if name in sys.modules)
import checkpoints, elastic, sympy
import torch
from torch.nn.parallel import DistributedDataParallel
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
environ = {k: v for k, v in os.environ.items() if k not in ("ELASTICD_WORKER_PID", "TORCHELASTIC_ERROR_FILE")}
print(json.dumps({
    "came_with": came_with, "pid": os.getpid(), "cmdline": open("/proc/self/cmdline").read().split("\\0")[4:],
    "same": {
        "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "umask": status["Umask"], "nice": stat[16],
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")], "threads": status["Threads"],
        "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()], "environ": environ,
        "grad": torch.is_grad_enabled(), "default": str(torch.get_default_dtype()),
        "beside": [checkpoints.MINE, elastic.MINE, sympy.MINE], "main": __name__, "file": __file__,
        "recursion": sys.getrecursionlimit(), "hook": str(sys.excepthook), "open": len(os.listdir("/proc/self/fd")),
        "cuda": torch.cuda.is_initialized(), "enumerate": [t.name for t in threading.enumerate()],
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(), "ignored": signal.getsignal(2) is not None,
    },
}))
"""


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox()
    yield box
    box.close()


def birth(folder: Path, *args: str, torch: bool = False) -> Birth:
    """Of a worker that runs `folder/script.py`; without torch it is warm at once."""
    environ = dict(os.environ)
    if not torch:
        (folder / "no-torch").mkdir(exist_ok=True)
        write(folder / "no-torch", "torch.py", "raise ImportError('not here')")
        environ["PYTHONPATH"] = str(folder / "no-torch")
    return Birth(command=Command(kind="script", target=str(folder / "script.py"), args=args), environ=environ)


def hear(pool: Standbys, mailbox: Mailbox, births: dict[int, Birth], *, seconds: float = 60.0) -> None:
    """Let the pool do its work until every standby is ready."""

    def look() -> bool:
        pool.tend(births)
        pool.collect(mailbox.wait(time.monotonic() + 0.05))
        return len(pool.warm) == len(births)

    wait_for(look, seconds=seconds, what="the standbys are ready")


def ended(child: Child, out: Path) -> dict[str, Any]:
    """What the worker printed, once it has ended."""
    child.begin(environ={"RANK": "3"}, stdout=str(out), stderr=str(out.with_suffix(".err")), scratch="")
    assert child.process.wait(60) == 0, out.with_suffix(".err").read_text()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_warm_process_becomes_what_a_cold_one_would(tmp_path: Path, mailbox: Mailbox) -> None:
    write(tmp_path, "script.py", PROBE)
    write(tmp_path, "mine.py", "import torch")
    for name in ("checkpoints", "elastic", "sympy"):
        write(tmp_path, f"{name}.py", "MINE = True")
    of_script = birth(tmp_path, "-x", "a b", torch=True)
    pool = Standbys(mailbox, ("mine",))
    try:
        hear(pool, mailbox, {0: of_script})
        (pid,) = pool.pids
        shown = Path(f"/proc/{pid}/cmdline").read_text()
        assert "standby" in shown.split("\0")[-2]
        assert "script.py" not in shown.split("\0")[-2], "taken for a worker by who looks for the script"
        taken = pool.take(0, of_script)
        assert taken is not None
        warm = ended(taken, tmp_path / "warm.out")
    finally:
        pool.close()
    cold = ended(Child(of_script), tmp_path / "cold.out")
    assert warm["pid"] == pid
    assert (warm["came_with"], cold["came_with"]) == (["torch", "torch._dynamo"], [])
    assert warm["same"] == cold["same"]
    assert warm["cmdline"] == cold["cmdline"] == [str(tmp_path / "script.py"), "-x", "a b", ""]


def test_who_is_not_ready_or_stopped_or_dead_or_another_is_not_taken_but_replaced(
    tmp_path: Path, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "_LOOK_SECONDS", 0.0)
    write(tmp_path, "script.py", "")
    write(tmp_path, "quick.py", "")
    mine = birth(tmp_path)
    pool = Standbys(mailbox, ("quick",))
    try:
        assert pool.take(0, mine) is None
        pool.tend({0: mine})
        assert pool.take(0, mine) is None, "nobody knows how long what is to be preloaded takes"
        hear(pool, mailbox, {0: mine})
        assert pool.take(0, birth(tmp_path, "another")) is None
        (first,) = pool.pids
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: _state(first) == "T")
        assert pool.take(0, mine) is None
        assert not Path(f"/proc/{first}").exists()
        hear(pool, mailbox, {0: mine})
        (second,) = pool.pids
        os.kill(second, signal.SIGSTOP)  # and not asked for: somebody looks now and then
        wait_for(lambda: _state(second) == "T")
        hear(pool, mailbox, {0: mine})
        (third,) = pool.pids
        os.kill(third, signal.SIGKILL)
        wait_for(lambda: _state(third) == "Z")
        pool.collect(mailbox.wait(time.monotonic() + 5))
        assert pool.pids == frozenset()
        hear(pool, mailbox, {0: mine})
        (fourth,) = pool.pids
        hear(pool, mailbox, {0: birth(tmp_path, "another")})
        assert not Path(f"/proc/{fourth}").exists(), "it could not have become what is wanted now"
        assert len({first, second, third, fourth}) == 4
    finally:
        pool.close()
    assert pool.pids == frozenset()


@pytest.mark.parametrize("has_said_so", [False, True])
def test_one_that_is_warming_up_starts_when_it_is_warm(tmp_path: Path, mailbox: Mailbox, has_said_so: bool) -> None:
    write(tmp_path, "script.py", "import json, os; print(json.dumps({'pid': os.getpid(), 'rank': os.environ['RANK']}))")
    mine = birth(tmp_path)
    pool = Standbys(mailbox, ())
    try:
        pool.tend({0: mine})
        (pid,) = pool.pids
        if has_said_so:  # and nobody has listened
            assert select.select([pool._all[0].child], [], [], 30)[0]
        child = pool.take(0, mine)
        assert child is not None
        assert not child.is_warm
        assert ended(child, tmp_path / "out") == {"pid": pid, "rank": "3"}
        assert pool.pids == frozenset()
    finally:
        pool.close()


def test_one_at_a_time_and_a_slow_one_is_replaced(
    tmp_path: Path, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(standbys, "_WARM_SECONDS", 1.0)
    write(tmp_path, "script.py", "")
    slow = write(tmp_path, "slow.py", "import time; time.sleep(60)")
    births = {0: birth(tmp_path), 1: birth(tmp_path, "two")}
    pool = Standbys(mailbox, ("slow",))
    try:
        pool.tend(births)
        pool.tend(births)
        (first,) = pool.pids
        slow.write_text("")
        wait_for(lambda: pool.tend(births) or first not in pool.pids, seconds=10)
        assert pool.are_ready(births), "nobody is to wait for what does not work"
        monkeypatch.setattr(standbys, "_WARM_SECONDS", 60.0)
        hear(pool, mailbox, births)
        assert first not in pool.pids
    finally:
        pool.close()


def test_a_module_that_cannot_be_preloaded_is_named_once_and_does_no_harm(
    tmp_path: Path, mailbox: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "script.py", "import json, sys; print(json.dumps(sorted(sys.modules.keys() & {'bad', 'good'})))")
    write(tmp_path, "bad.py", "print('noise'); raise SystemExit('no way')")
    write(tmp_path, "good.py", "")
    births = {0: birth(tmp_path), 1: birth(tmp_path, "two")}
    pool = Standbys(mailbox, ("bad", "good"))
    try:
        with caplog.at_level(logging.WARNING):
            hear(pool, mailbox, births)
        (message,) = [record.getMessage() for record in caplog.records]
        assert "bad" in message
        assert "SystemExit: no way" in message
        child = pool.take(0, births[0])
        assert child is not None
        child.begin(environ={}, stdout=str(tmp_path / "out"), stderr="", scratch="")
        assert child.process.wait(30) == 0
        assert (tmp_path / "out").read_text() == '["good"]\n'
    finally:
        pool.close()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def warm(job: Job, times: int = 1) -> None:
    wait_for(lambda: job.output.count("is warm") >= times, seconds=60, what="a warm standby")


def standby_of(job: Job) -> int:
    """The pid of the one process that shows itself as a standby."""
    (pid,) = [p for p in job.processes() if b"\0standby" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return pid


def test_after_a_kill_the_standby_is_the_worker_and_a_drain_leaves_nothing(tmp_path: Path) -> None:
    """As an unprivileged user, where the tests are root's."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == "root" and folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    tmp_path.chmod(0o777)
    write(tmp_path, "mine.py", "")
    write(
        tmp_path,
        "script.py",
        f"import runpy, sys\nprint('has', sorted(sys.modules.keys() & {{'torch', 'wave', 'mine'}}), flush=True)\n"
        f"sys.argv[0] = {TRAINER!r}\nrunpy.run_path({TRAINER!r}, run_name='__main__')",
    )
    args = (*QUICK, "--preload", "wave,mine", "--log-dir", "logs", "script.py", "100000", "0.02", "state")
    with running(tmp_path, *args, user=NOBODY, standby=True) as job:
        (worker,) = job.wait_step(3)["workers"]
        warm(job)
        standby = standby_of(job)
        stat = Path(f"/proc/{standby}/stat").read_text().rpartition(")")[2].split()
        assert (stat[0], stat[16]) == ("S", "0"), "idle, and at normal priority: a worker could not get it back"
        if NOBODY is not None:
            assert Path(f"/proc/{standby}").stat().st_uid == NOBODY
        os.kill(worker["pid"], signal.SIGKILL)
        status = job.wait_status(lambda s: s["incidents"] and s["incidents"][0]["seconds"]["total"])
        assert [worker["pid"] for worker in status["workers"]] == [standby]
        seconds = status["incidents"][0]["seconds"]
        assert seconds["total"] < 2.0, "there was something to import"
        assert sum(seconds[name] for name in seconds if name != "total") == pytest.approx(seconds["total"], rel=0.05)
        (log,) = tmp_path.glob("logs/*/attempt_1/0/stdout.log")
        assert log.read_text() == "has ['mine', 'torch', 'wave']\n"
        wait_for(lambda: len(job.processes()) >= 3, what="another standby is on its way")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
        assert not job.processes()


def test_the_warden_ends_standbys_too_and_the_pool_fills_again(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, TRAINER, "100000", "0.02", "state", standby=True) as job:
        job.wait_step(3)
        warm(job)
        before = {standby_of(job), *(worker["pid"] for worker in job.wait_status(bool)["workers"])}
        job.signal(signal.SIGSTOP)
        wait_for(lambda: not before & job.processes(), seconds=10.0, what="the warden has killed them")
        job.signal(signal.SIGCONT)
        thawed = job.wait_status(lambda s: s["round"] == 2 and s["state"] == "running")
        assert thawed["restarts"]["used"] == 0
        warm(job, times=2)
        assert standby_of(job) not in before
        job.signal(signal.SIGKILL)
        wait_for(lambda: not job.processes(), seconds=10.0, what="no process of the job is left")


def test_without_standbys_there_are_none(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--no-standby", TRAINER, "100000", "0.02", "state", standby=True) as job:
        job.wait_step(50)
        assert len(job.processes()) == 2, "the agent and the worker; the warden carries no mark"
