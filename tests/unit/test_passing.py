"""A host that has run short of threads or ports for a moment ends nothing: what lacked one is tried again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from elastic import pidfd
from elastic.agent import crew, instance, logs, starting, workers
from elastic.agent import guard as guards
from elastic.agent.child import Birth, Command
from elastic.agent.guard import Guard
from elastic.agent.instance import Instance
from elastic.agent.log_thread import log_thread
from elastic.agent.logs import Console
from elastic.agent.mailbox import Mailbox
from elastic.agent.starting import Start
from elastic.agent.systemd import Notifier
from elastic.config import JobConfig
from elastic.errors import ElasticError, StoreUnavailableError, UsageError
from elastic.metrics.goodput_file import KeptGoodput
from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from elastic.passing import start_thread
from elastic.rendezvous.connect import member_on
from elastic.rendezvous.etcd_watch import Watches
from elastic.rendezvous.identity import own_identity
from elastic.rendezvous.lease import LeaseKeeper
from elastic.rendezvous.participant import Settings
from elastic.rendezvous.round import Node
from elastic.rendezvous.store import Lease
from tests.rendezvous.peers import RULES
from tests.support.fake_store import FakeServer, FakeStore
from tests.support.job import wait_for

ENVIRONS = {0: {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}}


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """There is room for no thread until what this gives is called."""
    with monkeypatch.context() as patched:

        def refused(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refused)
        yield patched.undo


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_thread_that_cannot_be_started_is_an_oserror_that_passes(no_threads: Callable[[], None]) -> None:
    with pytest.raises(BlockingIOError, match=r"can't start new thread"):
        start_thread(threading.Thread(target=int))


def test_a_child_whose_end_cannot_be_waited_for_is_an_oserror_and_leaves_no_descriptor(
    no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pidfd, "open_pidfd", lambda _: None)  # an old kernel
    before = open_files()
    with pytest.raises(BlockingIOError):
        pidfd.end_of_child(os.getpid())
    assert open_files() == before


def test_a_warden_for_which_there_is_no_room_is_started_at_a_later_word_to_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = guards.end_of_child
    left: list[int] = []

    def short(pid: int) -> int:
        left.append(pid)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with contextlib.closing(Mailbox()) as mailbox, contextlib.closing(Guard(mailbox, "0" * 32, ())) as guard:
        monkeypatch.setattr(guards, "end_of_child", short)
        guard.start()
        guard.cover([])
        assert guard.pids == frozenset()
        assert guard.allow_for(60.0)
        assert caplog.text.count("no warden can be started now") == 1
        assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
        monkeypatch.setattr(guards, "end_of_child", real)
        guard.cover([])
        (pid,) = guard.pids
        os.kill(pid, signal.SIGKILL)
        assert [event.key for event in mailbox.wait(time.monotonic() + 10.0)] == [guards.KEY]  # and its end is seen


def test_a_round_goes_on_without_its_console_where_there_is_no_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_threads: Callable[[], None]
) -> None:
    destination = DefaultLogsSpecs(log_dir=str(tmp_path), tee=Std.ALL).reify(ENVIRONS)
    console = Console(JobConfig(script="x"))
    console.start(destination, ENVIRONS)
    assert "this round's output is not copied" in caplog.text
    console.close()
    no_threads()
    stopped: list[bool] = []
    real = TailLog.stop

    def stop(tail: TailLog) -> None:
        real(tail)
        stopped.append(tail.stopped())

    monkeypatch.setattr(TailLog, "stop", stop)
    monkeypatch.setattr(logs, "start_thread", no_room)
    console.start(destination, ENVIRONS)
    console.stop(linger_seconds=60.0)
    assert stopped == [True, True]  # now, by the loop itself
    console.close()


def no_room(*_: object) -> None:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket.bind

    def used_up(made: socket.socket, address: Any) -> None:
        if made.family != socket.AF_UNIX and address[1] == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        real(made, address)

    monkeypatch.setattr(socket.socket, "bind", used_up)


def test_a_host_without_a_free_port_lacks_room_and_a_port_that_was_named_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with crew._listen("", 0) as taken:
        with pytest.raises(UsageError, match="Address already in use: see --master-addr, --master-port"):
            crew._listen("127.0.0.1", taken.getsockname()[1])
        no_port(monkeypatch)
        with pytest.raises(OSError, match="Address already in use"):
            crew._listen("", 0)
        with pytest.raises(OSError, match="Address already in use"):
            bind_tcp("127.0.0.1", 0)


def test_an_agent_that_finds_no_port_for_its_page_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "_AGAIN_SECONDS", 0.01)
    tries: list[int] = []

    def attempt() -> socket.socket:
        tries.append(1)
        with monkeypatch.context() as patched:
            if len(tries) < 3:
                no_port(patched)
            return bind_tcp("127.0.0.1", 0)

    with contextlib.closing(Mailbox()) as mailbox:
        start = Start(mailbox, Notifier({}), usr1_drains=False, patience_seconds=30.0)
        start.find_room(attempt).close()
        assert caplog.text.count("the agent cannot be started: Address already in use: it is tried until") == 1
        impatient = Start(mailbox, Notifier({}), usr1_drains=False, patience_seconds=0.0)
        with pytest.raises(ElasticError, match=r"for 0 s \(--join-timeout\): .*ip_local_port_range") as caught:
            impatient.find_room(no_room)
        assert not isinstance(caught.value, UsageError)


def test_what_the_agent_starts_before_its_loop_leaves_nothing_where_there_is_no_room(
    no_threads: Callable[[], None], tmp_path: Path
) -> None:
    before = open_files()
    site = Site(status=lambda: None, healthy=lambda: True)  # type: ignore[arg-type]  # nobody asks
    with pytest.raises(BlockingIOError):
        StatusServer(bind_tcp("127.0.0.1", 0), tmp_path / "1.sock", site)
    with pytest.raises(BlockingIOError):
        KeptGoodput(tmp_path / "goodput")
    with pytest.raises(BlockingIOError), log_thread():
        raise AssertionError("not reached")
    assert open_files() == before


def test_an_agent_that_finds_no_room_in_its_runtime_directory_leaves_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_AGAIN_SECONDS", 0.01)
    before, fills = open_files(), [errno.ENOSPC, errno.EDQUOT]

    def opener(path: str, flags: int) -> int:
        assert {found.name.split("-")[0] for found in tmp_path.iterdir()} == {".agent"}
        if fills:
            raise OSError(fills.pop(), "no room")
        return os.open(path, flags, 0o640)

    monkeypatch.setattr(instance, "closed_to_others", opener)
    with contextlib.closing(Mailbox()) as mailbox:
        start = Start(mailbox, Notifier({}), usr1_drains=False, patience_seconds=30.0)
        start.find_room(lambda: Instance(tmp_path)).close()
    assert (fills, list(tmp_path.iterdir())) == ([], [])
    assert open_files() == before


def test_a_runtime_directory_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(UsageError, match=f"the runtime directory {tmp_path} cannot hold a lock: No locks available"):
        Instance(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lease_and_a_watch_without_a_thread_are_as_a_store_that_does_not_answer(
    no_threads: Callable[[], None],
) -> None:
    store = FakeStore(FakeServer(lambda: 0.0))
    with pytest.raises(StoreUnavailableError, match=r"the lease cannot be renewed: .*ulimit -u"):
        LeaseKeeper(store, Lease(id=1, ttl_seconds=5, sent=0.0), on_lost=lambda: None).start()
    watches = Watches(contextlib.nullcontext, timeout_seconds=1.0)  # type: ignore[arg-type]  # never asked
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match=r"/k cannot be watched: .*ulimit -u"):
            watches.add(["/k"], prefix=False, after_revision=0, on_events=lambda _: None, on_gap=lambda: None)
    watches.close()


@pytest.mark.parametrize("lacking", ["elasticd-member", "elasticd-lease"])
def test_a_member_joins_once_there_is_room_for_its_threads(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    member = member_on(
        FakeStore(FakeServer()),
        run_id="job",
        settings=Settings(
            node=Node(node_id="a", addr="127.0.0.1", slots=1), identity=own_identity(), rules=RULES, ttl_seconds=2
        ),
        join_timeout_seconds=30.0,
    )
    real, refused = threading.Thread.start, threading.Event()

    def short(thread: threading.Thread) -> None:
        if thread.name == lacking and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", short)
    with contextlib.closing(member):
        member.open(lambda: None)
        member.join(after=0, store_port=4711)
        wait_for(refused.is_set)

        def has_joined() -> bool:
            member.pump(0.0)
            return any(node.join for node in member.view().nodes)

        wait_for(has_joined, seconds=10)
        assert member.view().error is None


def test_a_worker_whose_end_cannot_be_seen_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    monkeypatch.setattr(workers, "end_of_child", no_room)
    before = open_files()
    plan = workers.WorkerPlan(local_rank=0, rank=0, environ={}, stdout="", stderr="", error_file="")
    with pytest.raises(BlockingIOError):
        workers.Worker(
            plan,
            Birth(command=Command(kind="program", target="sleep", args=("60",)), environ=dict(os.environ)),
            tmp_path / "block",
        )
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before
