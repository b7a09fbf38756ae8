"""This agent among the agents of the host: its runtime folder, and what dead ones have left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from elastic.agent.warden import MARK, carriers, is_alive, kill_everything
from elastic.agent.workers import remove_tree
from elastic.errors import UsageError
from elastic.runtime import closed_to_others

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 5.0
_WARDEN_SECONDS = 1.0
_PAUSE_SECONDS = 0.01
_NEW_SECONDS = 60.0


class Instance:
    """Folder `agent-<pid>` below the runtime directory, held by a lock, so that a dead agent's folder is recognised."""

    def __init__(self, runtime: Path) -> None:
        """Raises: UsageError when there can be none. OSError when the host has no room for it now."""
        self._runtime = runtime
        self.nonce = secrets.token_hex(16)
        self.folder = runtime / f"agent-{os.getpid()}"
        sweep(runtime)
        making = runtime / f".{self.folder.name}-{self.nonce[:8]}"
        making.mkdir(mode=0o700)
        with contextlib.ExitStack() as undo:
            undo.callback(remove_tree, making)
            self._lock = _open_lock(making / "lock", os.O_CREAT)
            undo.callback(os.close, self._lock)
            self._fill(making)
            undo.pop_all()

    def _fill(self, making: Path) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as exc:
            raise UsageError(
                f"the runtime directory {self._runtime} cannot hold a lock: {exc.strerror or exc}; set "
                "RUNTIME_DIRECTORY to one of this host's own"
            ) from exc
        with open(making / "nonce", "w", opener=closed_to_others) as file:  # for whoever sweeps after us
            file.write(self.nonce)
        try:
            making.rename(self.folder)  # from now on others see it, and it is locked
        except OSError as exc:
            raise UsageError(
                f"{self.folder} is held by another live agent, of another container then: give each of them a "
                "RUNTIME_DIRECTORY of its own"
            ) from exc

    def close(self) -> None:
        remove_tree(self.folder)
        os.close(self._lock)


def _open_lock(path: Path, create: int = 0) -> int:
    return os.open(path, os.O_RDWR | create | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def kill_what_it_left(folder: Path) -> bool:
    """What an agent that was killed together with its warden started, or with one that stands still.

    Returns whether nothing of it lives.
    """
    with contextlib.suppress(OSError):
        nonce = (folder / "nonce").read_text()
        if nonce and not kill_everything(nonce, [], deadline=time.monotonic() + _SWEEP_SECONDS):
            logger.warning("processes of the killed agent %s cannot be killed", folder.name)
            return False
        if nonce:
            _end_warden(nonce)
    return True


def _end_warden(nonce: str) -> None:
    """Nothing is left for it to do: one that does not see that holds the job's locks for nothing."""
    pids, deadline = carriers(f"{MARK}={nonce}"), time.monotonic() + _WARDEN_SECONDS
    while pids := {pid for pid in pids if is_alive(pid)}:
        if time.monotonic() >= deadline:
            for pid in pids:
                logger.warning("the warden (pid %d) of the killed agent stands still: it is killed", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(_PAUSE_SECONDS)


def sweep(runtime: Path, take_leave: Callable[[Path], object] = kill_what_it_left) -> None:
    """Remove what agents left that were killed; `take_leave` is called with the folder of each before."""
    for folder in [*runtime.glob("agent-*"), *runtime.glob(".agent-*")]:
        try:
            if folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _NEW_SECONDS:
                continue  # somebody is making it
            descriptor = _open_lock(folder / "lock")
        except FileNotFoundError:  # what somebody had begun to remove
            remove_tree(folder)
            continue
        except OSError:
            continue
        try:
            if _try_lock(descriptor):
                take_leave(folder)
                remove_tree(folder)
                (runtime / f"{folder.name.removeprefix('agent-')}.sock").unlink(missing_ok=True)
                logger.info("removed what a killed agent had left: %s", folder.name)
        finally:
            os.close(descriptor)
