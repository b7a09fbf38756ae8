"""Agents of one host, or of several containers, that share a runtime directory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
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


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[list[Instance]]:
    """As if each were of an agent of its own: with a runtime directory for each."""
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(Instance(tmp_path / name))
    yield made
    for instance in made:
        instance.close()


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [
        pytest.param(False, False, r"the agent with pid \d+", id="two jobs of one node"),
        pytest.param(True, False, "agents of a job with --rdzv-endpoint", id="of one node, beside one of many"),
        pytest.param(False, True, r"the agent with pid \d+", id="of many, beside one of one node"),
        pytest.param(True, True, "", id="agents of many nodes share it"),
    ],
)
def test_a_checkpoint_directory_is_for_one_job(
    instances: list[Instance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, second: bool, who: str
) -> None:
    monkeypatch.setattr("elastic.agent.instance._LOCK_WAIT_SECONDS", 0.2)
    instances[0].lock_job(str(tmp_path / "ckpt"), shared=first)
    if who:
        with pytest.raises(UsageError, match=f"ckpt is in use by {who}: drain that one first"):
            instances[1].lock_job(str(tmp_path / "ckpt"), shared=second)
    else:
        instances[1].lock_job(str(tmp_path / "ckpt"), shared=second)


def test_where_files_cannot_be_locked_the_lock_lies_elsewhere(
    instances: list[Instance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flock = fcntl.flock

    def on_lustre(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(tmp_path / "ckpt"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", on_lustre)
    instances[0].lock_job(str(tmp_path / "ckpt"), shared=False)
    assert "ckpt cannot hold a lock: Function not implemented" in caplog.text
    assert list((tmp_path / "a").glob("job-*.lock"))


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
