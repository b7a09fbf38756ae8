"""What the agent tells systemd, heard at a real socket; and what one start knows of the one before it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.systemd import Life, Notifier
from elastic.errors import ExitCode
from elastic.status import CheckpointStatus, FailureStatus, JobStatus, NodeStatus, WaitingStatus, WorkerStatus

JOINING = JobStatus(run_id="job", incarnation="i", node_id="a", state="joining")
RUNNING = dataclasses.replace(
    JOINING,
    state="running",
    round=3,
    world_size=2,
    nodes=(NodeStatus(node_id="a", node_rank=0, addr="h", ranks=(0, 1)),),
    workers=(WorkerStatus(local_rank=0, step=7), WorkerStatus(local_rank=1, step=8)),
)


class Listener:
    """systemd's end of the notification socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.address = address

    def heard(self) -> list[str]:
        """All lines since the last time."""
        lines: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines += self.socket.recv(65536).decode().split("\n")
        return lines

    def environ(self, **more: str) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, **more}


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(str(tmp_path / "s") if request.param == "path" else f"@elasticd-test-{os.getpid()}")
    yield listener
    listener.socket.close()


def test_readiness_and_state_are_told_once_and_on_change(systemd: Listener) -> None:
    notifier = Notifier(systemd.environ())
    notifier.passed(JOINING, stopping=False)
    assert "READY=1" not in systemd.heard()
    notifier.passed(RUNNING, stopping=False)
    assert systemd.heard() == ["READY=1", "STATUS=running: 2 ranks on 1 node, round 3, step 8"]
    notifier.passed(RUNNING, stopping=False)
    assert systemd.heard() == []
    notifier.passed(JOINING, stopping=False)
    assert systemd.heard() == ["STATUS=joining: 0 ranks on 0 nodes"]


def test_a_node_that_waits_for_others_is_ready_and_says_what_for(systemd: Listener) -> None:
    waiting = dataclasses.replace(
        JOINING, state="waiting", waiting=(WaitingStatus(node_id="a", reason="1 of 2 nodes"),)
    )
    Notifier(systemd.environ()).passed(waiting, stopping=False)
    heard = systemd.heard()
    assert "READY=1" in heard
    assert "STATUS=waiting: 0 ranks on 0 nodes, a waits: 1 of 2 nodes" in heard


def test_the_status_line_stays_one_line_whatever_a_failure_says(systemd: Listener) -> None:
    failure = FailureStatus(rank=1, node_id="a", reason="exited\nREADY=0", message="ValueError: x\nmore")
    checkpoint = CheckpointStatus(disk_step=5, failed_saves=2)
    failed = dataclasses.replace(RUNNING, last_failure=failure, checkpoint=checkpoint)
    Notifier(systemd.environ()).passed(failed, stopping=False)
    assert systemd.heard()[1:] == [
        "STATUS=running: 2 ranks on 1 node, round 3, step 8, committed 5, 2 saves failed since, "
        "last failure: rank 1 exited READY=0: ValueError: x"
    ]


def test_the_watchdog_is_fed_by_each_pass(systemd: Listener) -> None:
    notifier = Notifier(systemd.environ(WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid())))
    assert notifier.watchdog_seconds == 30.0
    for _ in range(3):
        notifier.passed(RUNNING, stopping=False)
    assert systemd.heard().count("WATCHDOG=1") == 3
    assert systemd.heard() == []


def test_the_watchdog_is_patient_while_everything_is_taken_down(systemd: Listener) -> None:
    notifier = Notifier(systemd.environ(WATCHDOG_USEC="2000000", WATCHDOG_PID=str(os.getpid())))
    notifier.ending(ExitCode.DRAINED)
    assert {"STOPPING=1", "WATCHDOG_USEC=60000000", "WATCHDOG=1"} <= set(systemd.heard())


def test_a_watchdog_that_is_meant_for_another_process_is_not_fed(systemd: Listener) -> None:
    notifier = Notifier(systemd.environ(WATCHDOG_USEC="30000000", WATCHDOG_PID="1"))
    notifier.passed(RUNNING, stopping=False)
    assert "WATCHDOG=1" not in systemd.heard()


def test_a_start_and_a_stop_may_take_as_long_as_passes_are_finished(systemd: Listener) -> None:
    notifier = Notifier(systemd.environ())
    more_time = "EXTEND_TIMEOUT_USEC=30000000"
    notifier.passed(JOINING, stopping=False)
    assert more_time in systemd.heard()
    notifier.passed(RUNNING, stopping=False)
    assert more_time not in systemd.heard()
    notifier.passed(RUNNING, stopping=True)
    assert more_time in systemd.heard()


@pytest.mark.parametrize(
    ("code", "ready"), [(ExitCode.SUCCEEDED, True), (ExitCode.DRAINED, True), (ExitCode.FAILED, False)]
)
def test_an_end_before_the_job_was_ready_counts_as_what_it_is(systemd: Listener, code: ExitCode, ready: bool) -> None:
    Notifier(systemd.environ()).ending(code)
    heard = systemd.heard()
    assert "STOPPING=1" in heard
    assert ("READY=1" in heard) == ready


def test_no_worker_inherits_what_only_the_agent_may_use(systemd: Listener) -> None:
    environ = systemd.environ(WATCHDOG_USEC="1", WATCHDOG_PID="1", HOME="/")
    Notifier(environ)
    assert environ == {"HOME": "/"}


def test_a_change_that_could_not_be_told_is_told_again(systemd: Listener) -> None:
    notifier = Notifier(systemd.environ())
    sent = 0
    while sent < 5000 and notifier._send("X=1"):  # until the queue is full
        sent += 1
    notifier.state(READY="1")
    systemd.heard()
    notifier.state(READY="1")
    assert systemd.heard() == ["READY=1"]


def test_without_systemd_nothing_is_said() -> None:
    notifier = Notifier({})
    notifier.passed(RUNNING, stopping=False)
    notifier.ending(ExitCode.SUCCEEDED)
    assert (notifier.is_listened_to, notifier.watchdog_seconds) == (False, 0.0)


def test_a_socket_that_is_gone_is_complained_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")})
    for _ in range(3):
        notifier.passed(RUNNING, stopping=False)
    assert len(caplog.records) == 1


def test_a_start_after_a_crash_is_a_restart(tmp_path: Path) -> None:
    assert not Life(tmp_path, supervised=True).restarted
    assert Life(tmp_path, supervised=True).restarted


@pytest.mark.parametrize("code", list(ExitCode))
def test_only_an_end_that_systemd_restarts_makes_the_next_start_a_restart(tmp_path: Path, code: ExitCode) -> None:
    Life(tmp_path, supervised=True).end(code)
    is_restarted = code in (ExitCode.NOT_ENOUGH_NODES, ExitCode.STORE_GONE, ExitCode.STEPS_LOST)
    assert Life(tmp_path, supervised=True).restarted is is_restarted


@pytest.mark.parametrize("before", [False, True])
def test_a_start_that_did_not_get_as_far_as_its_loop_does_not_make_the_next_one_a_restart(
    tmp_path: Path, before: bool
) -> None:
    """A file server that is away at the first start, say: the job of before is not to be taken up."""
    if before:
        Life(tmp_path, supervised=True)
    Life(tmp_path, supervised=True).not_begun(ExitCode.STORE_GONE)
    assert Life(tmp_path, supervised=True).restarted is before
    Life(tmp_path, supervised=True).not_begun(ExitCode.USAGE)
    assert not Life(tmp_path, supervised=True).restarted


def test_without_systemd_every_start_is_an_operators(tmp_path: Path) -> None:
    Life(tmp_path, supervised=False)
    assert not Life(tmp_path, supervised=False).restarted
