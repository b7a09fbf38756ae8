"""The local workers of one round: start them, watch them, stop them with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGKILL, SIGQUIT, Signals

from elastic import profile_order, progress
from elastic.agent.child import Birth, Child
from elastic.agent.mailbox import Mailbox, Readable
from elastic.pidfd import end_of_child
from elastic.profile_order import ProfileOrder
from elastic.runtime import closed_to_others
from elastic.timings import NO_TIMINGS, Timings

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_SOCKET_FOLDER_BYTES = 88  # what multiprocessing's names leave of the 107 that a socket's path may have
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker to start."""

    local_rank: int
    rank: int
    environ: Mapping[str, str]  # on top of the agent's own
    stdout: str  # path of a log file, empty: the agent's own stream
    stderr: str
    error_file: str


class Worker:
    """One process of the round and its progress block."""

    def __init__(
        self, plan: WorkerPlan, birth: Birth, block: Path, take: Callable[[int, Birth], Child | None] | None = None
    ) -> None:
        """`birth` is what a standby of this worker was born with; `take` gives one where there is a warm one."""
        self.plan = plan
        progress.create(block)
        self._block = block
        self._scratch = block.with_name(f"{block.name}.tmp")
        self._reader: progress.ProgressReader | None = progress.ProgressReader(block)
        self._last = progress.Progress()
        self._last_timings = NO_TIMINGS
        self.exit_code: int | None = None
        self.exited_at = 0.0
        self.stopped_by_us = False
        self.was_warm = False
        self.counts_as_running = False  # for the status; once it does it stays so
        self.started_at = time.monotonic()
        environ = {**plan.environ, progress.ENVIRONMENT_KEY: str(block)}
        try:
            if birth.command.kind == "program":
                self.process = self._start_program(birth, environ)
            else:
                self.process = self._start_python(birth, environ, take)
            self.pid = self.process.pid
            self.end = self._end()
        except OSError:
            self._reader.close()
            block.unlink()
            raise

    def _end(self) -> int:
        """Readable when the process has ended; one whose end nobody would see is not left. Raises: OSError."""
        try:
            return end_of_child(self.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            raise

    def _start_python(
        self, birth: Birth, environ: dict[str, str], take: Callable[[int, Birth], Child | None] | None
    ) -> subprocess.Popen[bytes]:
        scratch = str(self._scratch) if len(os.fsencode(self._scratch)) <= _SOCKET_FOLDER_BYTES else ""
        if scratch:
            self._scratch.mkdir(mode=0o700, exist_ok=True)
        standby = take(self.plan.local_rank, birth) if take else None
        child = standby or Child(dataclasses.replace(birth, environ={**birth.environ, **environ}))
        self.was_warm = child.is_warm
        child.begin(environ=environ, stdout=self.plan.stdout, stderr=self.plan.stderr, scratch=scratch)
        return child.process

    def _start_program(self, birth: Birth, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        command = birth.command
        with contextlib.ExitStack() as files:
            streams = [
                files.enter_context(open(path, "ab", opener=closed_to_others)) if path else None
                for path in (self.plan.stdout, self.plan.stderr)
            ]
            return subprocess.Popen(
                [*birth.launcher, command.target, *command.args],
                env={**birth.environ, **environ},
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=birth.keep_open,
                start_new_session=True,
            )

    @property
    def progress(self) -> progress.Progress:
        """The newest report, which outlives the worker and its block."""
        newest = self._reader.read() if self._reader else None
        if newest is not None:
            self._last = newest
        return self._last

    @property
    def timings(self) -> Timings:
        """The newest histograms, which outlive the worker as its report does."""
        newest = self._reader.read_timings() if self._reader else None
        if newest is not None:
            self._last_timings = newest
        return self._last_timings

    @property
    def is_damaged(self) -> bool:
        """Whether its block could not be read when it was last looked at."""
        return self._reader is not None and self._reader.is_damaged

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def how_it_ended(self) -> str:
        """For the log; only once it has."""
        if self.stopped_by_us:
            return "stopped by the agent"
        code = self.exit_code or 0
        return signal_name(-code) if code < 0 else f"exit code {code}"

    def reap(self) -> None:
        """Take the exit code; called when `end` is readable.

        What is left of its process group (loader children) goes first: until it is reaped, nobody else can get its pid.
        """
        self.signal(SIGKILL)
        code = self.process.poll()
        if code is not None and self.exit_code is None:
            self.exit_code = code
            self.exited_at = time.monotonic()

    def signal(self, number: Signals) -> None:
        """To the worker's whole process group, loader children included. Not after it was reaped."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def catches(self, number: Signals) -> bool:
        """Whether the worker has a handler for this signal: one without would die of it."""
        return _catches(self.pid, number)

    def dump_stacks(self) -> None:
        """Python stacks of all threads to its stderr, also of loader children, whose fork has kept our handler.

        A stopped process writes them when it goes on: it is let go on, so kill it soon.
        """
        for pid in _group(self.pid):
            if _catches(pid, SIGQUIT):  # one without a handler would dump core instead
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    _kill_main_thread(pid, SIGQUIT)
                    os.kill(pid, SIGCONT)

    def request_drain(self) -> None:
        if self._reader:
            self._reader.request_drain()

    def request_save(self) -> None:
        if self._reader:
            self._reader.request_save()

    def request_profile(self, order: ProfileOrder) -> None:
        """Raises: OSError when it cannot be handed over."""
        if self._reader:
            profile_order.write(profile_order.beside(self._block), order.to_json())
            self._reader.request_profile()

    def close(self) -> None:
        """The process is gone: keep its last report, give the rest back."""
        _ = self.progress
        os.close(self.end)
        if self._reader:
            self._reader.close()
        self._reader = None
        self._block.unlink(missing_ok=True)
        profile_order.beside(self._block).unlink(missing_ok=True)
        remove_tree(self._scratch)


class Workers:
    """All local workers of one round."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.all: list[Worker] = []

    def start(
        self,
        plans: list[WorkerPlan],
        births: Mapping[int, Birth],
        blocks: Path,
        take: Callable[[int, Birth], Child | None],
    ) -> None:
        """Start one process per plan; what was started stays in `all` when a later one fails. Raises: OSError."""
        self.all = []
        for plan in plans:
            block = blocks / f"progress-{plan.rank}-{plan.local_rank}"
            worker = Worker(plan, births[plan.local_rank], block, take)
            self.all.append(worker)
            self._mailbox.watch(worker.end, worker)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.all if worker.is_alive]

    def collect(self, events: list[object]) -> list[Worker]:
        """Reap the workers that ended; returns them in the order in which that was seen."""
        ended = [e.key for e in events if isinstance(e, Readable) and isinstance(e.key, Worker)]
        for worker in ended:
            worker.reap()
            if not worker.is_alive:
                self._mailbox.unwatch(worker.end)
        return [worker for worker in ended if not worker.is_alive]

    def signal(self, number: Signals) -> None:
        for worker in self.alive:
            worker.signal(number)

    def kill(self) -> None:
        """SIGKILL to every process group, at once; the ends arrive as events."""
        for worker in self.alive:
            worker.stopped_by_us = True
            worker.signal(SIGKILL)

    def dump_stacks(self) -> None:
        """Python stacks of all threads into the workers' stderr."""
        for worker in self.alive:
            worker.dump_stacks()

    def reopen_logs(self) -> None:
        for worker in self.alive:
            if (worker.plan.stdout or worker.plan.stderr) and worker.catches(SIGHUP):
                os.kill(worker.pid, SIGHUP)

    def close(self) -> None:
        """All are gone: their blocks and descriptors are given back."""
        for worker in self.all:
            worker.close()


def signal_name(number: int) -> str:
    """`SIGKILL`; real-time signals have a number alone."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def adopt_orphans() -> None:
    """Make this process the parent of whatever its workers leave behind (PR_SET_CHILD_SUBREAPER)."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        logger.warning("cannot adopt orphans: a worker's detached children may outlive it")


def reap_orphans(known: frozenset[int]) -> None:
    """Take the exit codes of adopted children that have ended; `known` ones have somebody who waits for them."""
    threads: list[str] = []
    with contextlib.suppress(OSError):  # no descriptor is left: there is another time
        threads = os.listdir("/proc/self/task")  # noqa: PTH208
    for thread in threads:
        with contextlib.suppress(OSError):  # that thread has ended
            for pid in Path(f"/proc/self/task/{thread}/children").read_text().split():
                if int(pid) not in known:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(int(pid), os.WNOHANG)


def _kill_main_thread(pid: int, number: Signals) -> None:
    """So that this thread, and no other, runs the handler: in a stopped process it would otherwise run on meanwhile.

    Raises: ProcessLookupError.
    """
    try:
        tgkill = _LIBC.tgkill
    except AttributeError:  # a C library without it
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number) and ctypes.get_errno() == errno.ESRCH:
        raise ProcessLookupError(pid)


def _catches(pid: int, number: Signals) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _group(leader: int) -> list[int]:
    """The processes of a process group, its leader first."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader:
                found.append(int(entry.name))
    return sorted(found, key=lambda pid: pid != leader)


def remove_tree(path: Path) -> None:
    """Delete a runtime folder of ours; missing is fine."""
    shutil.rmtree(path, ignore_errors=True)
