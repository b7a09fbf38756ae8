"""Agents of one host, or of several containers, that share a runtime directory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic.agent.instance import Instance, sweep
from elastic.agent.workers import reap_orphans
from elastic.errors import UsageError

CHURN = """
import sys
from pathlib import Path
from elastic.agent.instance import Instance
for _ in range(150):
    Instance(Path(sys.argv[1])).close()
"""


def test_agents_that_come_and_go_at_once_do_not_take_each_others_folders(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", CHURN, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_live_agent_of_another_container_with_the_same_pid_keeps_its_folder(tmp_path: Path) -> None:
    theirs = tmp_path / f"agent-{os.getpid()}"
    theirs.mkdir()
    with (theirs / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"agent-\d+ is held by another live agent.*RUNTIME_DIRECTORY"):
            Instance(tmp_path)
    assert (theirs / "lock").exists()
    assert [path.name for path in tmp_path.iterdir()] == [theirs.name]


def test_what_a_killed_agent_left_is_removed_also_when_that_was_begun_before(tmp_path: Path) -> None:
    for name in ("agent-1", "agent-2", ".agent-3-new", ".agent-4-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "agent-1" / "lock").touch()
    (tmp_path / "agent-2" / "logs").mkdir()
    os.utime(tmp_path / ".agent-4-old", (1, 1))
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".agent-3-new"]


def test_orphans_are_reaped_while_threads_come_and_go() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            threading.Thread(target=lambda: None).start()

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        for _ in range(1000):
            reap_orphans(frozenset())
    finally:
        stop.set()
        churning.join()
