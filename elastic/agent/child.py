"""The agent's end of one process of the entry point: its birth, its warm-up, its start message."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ENTRY_POINT = str(Path(__file__).with_name("standby.py").resolve())
_PATIENCE_SECONDS = 5.0
_SHOWN_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a worker runs: `kind` is script, module, or program (no Python at all)."""

    kind: str
    target: str
    args: tuple[str, ...]

    @property
    def shown(self) -> list[str]:
        """Its part of the process's command line."""
        return [*(["-m"] if self.kind == "module" else []), self.target, *self.args]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """All that is settled when a process is started and cannot be changed later."""

    command: Command
    environ: Mapping[str, str]
    launcher: tuple[str, ...] = ()  # prefix that binds it to its NUMA node
    keep_open: tuple[int, ...] = ()  # descriptors that it inherits and holds until it ends


def inherited() -> dict[str, str]:
    """The agent's environment without what is ours: a job inside a worker of another job is none of its business, and a
    password for etcd none of a worker's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}


class Child:
    """One process that waits for its start message: a cold one gets it at once, a standby is warmed up first."""

    def __init__(self, birth: Birth, *, preload: tuple[str, ...] | None = None) -> None:
        """`preload` makes it a standby: what it imports ahead besides torch. Raises: OSError."""
        self.birth = birth
        self.is_warm = False  # it has said so
        self._channel, theirs = socket.socketpair()
        command = birth.command
        shown = command.shown if preload is None else [_placeholder(command)]
        interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
        passed = (theirs.fileno(), *birth.keep_open)
        argv = [*birth.launcher, interpreter, "-u", _ENTRY_POINT, ",".join(map(str, passed)), *shown]
        try:
            self.process = subprocess.Popen(argv, env=dict(birth.environ), pass_fds=passed, start_new_session=True)
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._channel.settimeout(_PATIENCE_SECONDS)
        if preload is not None:
            self._send({"kind": command.kind, "target": command.target, "preload": preload})

    @property
    def pid(self) -> int:
        return self.process.pid

    def fileno(self) -> int:
        """Readable when a standby has said that it is ready, and when the process is gone."""
        return self._channel.fileno()

    def answer(self) -> dict[str, str] | None:
        """What a standby says when it is ready: the modules that it could not preload. None: it is gone."""
        try:
            text = self._channel.recv(65536)
            failed: dict[str, str] = json.loads(text)
        except (OSError, ValueError):
            return None
        return failed

    @property
    def is_waiting(self) -> bool:
        """Whether it would take a message: it is there, and nobody has stopped it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X")

    def begin(self, *, environ: Mapping[str, str], stdout: str, stderr: str, scratch: str) -> None:
        """Become the worker. Whoever does not take the message is killed: its end is then seen like any other's.

        `scratch`: a folder for sockets of its own; empty: it looks for one itself.
        """
        command = self.birth.command
        self._send(
            {
                "kind": command.kind,
                "target": command.target,
                "args": command.args,
                "shown": command.shown,
                "environ": dict(environ),
                "cwd": "",
                "umask": _umask(),
                "stdout": stdout,
                "stderr": stderr,
                "scratch": scratch,
            }
        )
        self._channel.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            with contextlib.suppress(OSError):  # not `process.kill`, which would take the exit code of one that is gone
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and take its exit code."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep: it ends when it can
            self.process.wait(_PATIENCE_SECONDS)
        self._channel.close()


def _placeholder(command: Command) -> str:
    """Shown for a standby: neither `pgrep -f` nor a person takes it for a worker. As long as what will stand there."""
    room = min(len("\0".join(command.shown).encode(errors="surrogateescape")), _SHOWN_BYTES)
    return "standby"[:room].ljust(room)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    current = os.umask(0o022)
    os.umask(current)
    return current
