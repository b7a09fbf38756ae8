"""The local workers of one round: start them, watch them by pidfd, stop them with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGQUIT, Signals

from torch.distributed.elastic.utils.api import macros

from elastic import progress
from elastic.agent.mailbox import Mailbox, Readable
from elastic.timings import NO_TIMINGS, Timings

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_ENTRY_POINT = str(Path(__file__).with_name("standby.py").resolve())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a worker runs: `kind` is script, module, or program (no Python at all)."""

    kind: str
    target: str
    args: tuple[str, ...]


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

    def __init__(self, plan: WorkerPlan, command: Command, block: Path, launcher: tuple[str, ...] = ()) -> None:
        self.plan = plan
        self.command = dataclasses.replace(
            command, args=tuple(macros.substitute(list(command.args), str(plan.local_rank)))
        )
        progress.create(block)
        self._block = block
        self._reader: progress.ProgressReader | None = progress.ProgressReader(block)
        self._last = progress.Progress()
        self._last_timings = NO_TIMINGS
        self.exit_code: int | None = None
        self.exited_at = 0.0
        self.stopped_by_us = False
        self.started_at = time.monotonic()
        environ = {**_inherited(), **plan.environ, progress.ENVIRONMENT_KEY: str(block)}
        start = self._start_program if command.kind == "program" else self._start_python
        try:
            self.process = start(environ, launcher)
        except OSError:
            self._reader.close()
            block.unlink()
            raise
        self.pid = self.process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            raise

    def _start_python(self, environ: dict[str, str], launcher: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start the entry point and send it the message at once; a standby will get the same message later."""
        receiving, sending = os.pipe()
        interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
        module = ["-m"] if self.command.kind == "module" else []  # for the reader of `ps` only
        argv = [
            *launcher,
            interpreter,
            "-u",
            _ENTRY_POINT,
            str(receiving),
            *module,
            self.command.target,
            *self.command.args,
        ]
        try:
            process = subprocess.Popen(argv, env=environ, pass_fds=(receiving,), start_new_session=True)
        except OSError:
            os.close(sending)
            raise
        finally:
            os.close(receiving)
        message = {
            "kind": self.command.kind,
            "target": self.command.target,
            "args": list(self.command.args),
            "environ": {},
            "cwd": "",
            "umask": _umask(),
            "stdout": self.plan.stdout,
            "stderr": self.plan.stderr,
        }
        with contextlib.suppress(BrokenPipeError), os.fdopen(sending, "wb") as pipe:  # it died: its pidfd will tell
            pipe.write(json.dumps(message).encode())
        return process

    def _start_program(self, environ: dict[str, str], launcher: tuple[str, ...]) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as files:
            streams = [
                files.enter_context(Path(path).open("ab")) if path else None
                for path in (self.plan.stdout, self.plan.stderr)
            ]
            argv = [*launcher, self.command.target, *self.command.args]
            return subprocess.Popen(argv, env=environ, stdout=streams[0], stderr=streams[1], start_new_session=True)

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

    def reap(self) -> None:
        """Take the exit code; called when the pidfd is readable.

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
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def request_drain(self) -> None:
        if self._reader:
            self._reader.request_drain()

    def request_save(self) -> None:
        if self._reader:
            self._reader.request_save()

    def close(self) -> None:
        """The process is gone: keep its last report, give the rest back."""
        _ = self.progress
        os.close(self.pidfd)
        if self._reader:
            self._reader.close()
        self._reader = None
        self._block.unlink(missing_ok=True)


def _inherited() -> dict[str, str]:
    """The agent's environment without what is ours: a job inside a worker of another job is none of its business, and a
    password for etcd none of a worker's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}


class Workers:
    """All local workers of one round."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.all: list[Worker] = []

    def start(self, plans: list[WorkerPlan], command: Command, blocks: Path, launchers: list[tuple[str, ...]]) -> None:
        """Start one process per plan; what was started stays in `all` when a later one fails. Raises: OSError."""
        self.all = []
        for plan, launcher in zip(plans, launchers, strict=True):
            worker = Worker(plan, command, blocks / f"progress-{plan.rank}-{plan.local_rank}", launcher)
            self.all.append(worker)
            self._mailbox.watch(worker.pidfd, worker)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.all if worker.is_alive]

    def collect(self, events: list[object]) -> list[Worker]:
        """Reap the workers that ended; returns them in the order in which that was seen."""
        ended = [e.key for e in events if isinstance(e, Readable) and isinstance(e.key, Worker)]
        for worker in ended:
            worker.reap()
            if not worker.is_alive:
                self._mailbox.unwatch(worker.pidfd)
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
            if worker.catches(SIGQUIT):  # one without a handler would dump core instead
                os.kill(worker.pid, SIGQUIT)

    def reopen_logs(self) -> None:
        for worker in self.alive:
            if (worker.plan.stdout or worker.plan.stderr) and worker.catches(SIGHUP):
                os.kill(worker.pid, SIGHUP)

    def close(self) -> None:
        """All are gone: their blocks and descriptors are given back."""
        for worker in self.all:
            worker.close()


def adopt_orphans() -> None:
    """Make this process the parent of whatever its workers leave behind (PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        logger.warning("cannot adopt orphans: a worker's detached children may outlive it")


def reap_orphans(known: frozenset[int]) -> None:
    """Take the exit codes of adopted children that have ended; `known` ones have somebody who waits for them."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if int(pid) not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(pid), os.WNOHANG)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    current = os.umask(0o022)
    os.umask(current)
    return current


def remove_tree(path: Path) -> None:
    """Delete a runtime folder of ours; missing is fine."""
    shutil.rmtree(path, ignore_errors=True)
