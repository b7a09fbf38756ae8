"""This agent among the agents of the host: its runtime folder, and the lock that keeps a job from running twice."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from elastic.agent.warden import kill_everything
from elastic.agent.workers import remove_tree
from elastic.errors import UsageError
from elastic.runtime import closed_to_others

logger = logging.getLogger(__name__)

_LOCK_WAIT_SECONDS = 15.0
_SWEEP_SECONDS = 5.0
_NEW_SECONDS = 60.0


class Instance:
    """Folder `agent-<pid>` below the runtime directory, held by a lock, so that a dead agent's folder is recognised."""

    def __init__(self, runtime: Path) -> None:
        """Raises: UsageError when there can be none."""
        self._runtime = runtime
        self.nonce = secrets.token_hex(16)
        self.folder = runtime / f"agent-{os.getpid()}"
        sweep(runtime)
        making = runtime / f".{self.folder.name}-{self.nonce[:8]}"
        making.mkdir(mode=0o700)
        self._lock = _open_lock(making / "lock", os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with open(making / "nonce", "w", opener=closed_to_others) as file:  # for whoever sweeps after us
            file.write(self.nonce)
        try:
            making.rename(self.folder)  # from now on others see it, and it is locked
        except OSError as exc:
            os.close(self._lock)
            remove_tree(making)
            raise UsageError(
                f"{self.folder} is held by another live agent, of another container then: give each of them a "
                "RUNTIME_DIRECTORY of its own"
            ) from exc
        self._job_lock: int | None = None

    def lock_job(self, checkpoint_dir: str, *, shared: bool) -> int:
        """Hold the checkpoint directory for this job alone; the descriptor is for the warden to inherit.

        `shared`: this is one of several agents of a job, among which etcd keeps order.
        An agent that was just killed may still have a warden at work on its workers, so wait for a while.

        Raises: UsageError when another live agent has the directory.
        """
        self._job_lock = descriptor = _open_job_lock(checkpoint_dir, self._runtime)
        deadline = time.monotonic() + _LOCK_WAIT_SECONDS
        while not _try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            if _is_running(holder) or time.monotonic() >= deadline:
                os.close(descriptor)
                self._job_lock = None
                who = f"the agent with pid {holder}" if holder else "agents of a job with --rdzv-endpoint"
                raise UsageError(
                    f"--checkpoint-dir {checkpoint_dir} is in use by {who}: "
                    "drain that one first (`elasticd drain`), or give this job a directory of its own"
                )
            time.sleep(0.05)  # the holder is dead and its warden is cleaning up
        os.ftruncate(descriptor, 0)
        if not shared:
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def close(self) -> None:
        remove_tree(self.folder)
        os.close(self._lock)
        if self._job_lock is not None:
            os.ftruncate(self._job_lock, 0)  # no pid that is ours; agents that share it write none
            os.close(self._job_lock)
            self._job_lock = None


def _open_job_lock(checkpoint_dir: str, runtime: Path) -> int:
    """In the directory itself, so that it holds whatever path, user or runtime directory leads there.

    Where that cannot be (a URL, a read-only file system, Lustre without `flock`) it lies in the runtime directory,
    under the path's name.
    """
    if "://" not in checkpoint_dir:
        try:
            Path(checkpoint_dir).mkdir(mode=0o750, parents=True, exist_ok=True)
            descriptor = _open_lock(Path(checkpoint_dir) / ".lock", os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # nothing, but where locks are unknown
            except OSError:
                os.close(descriptor)
                raise
            return descriptor
        except OSError as exc:
            logger.warning("--checkpoint-dir %s cannot hold a lock: %s", checkpoint_dir, exc.strerror or exc)
    name = hashlib.sha256(os.path.realpath(checkpoint_dir).encode()).hexdigest()[:16]
    return _open_lock(runtime / f"job-{name}.lock", os.O_CREAT)


def _is_running(pid: str) -> bool:
    """Whether a live elasticd agent has this pid; one that is stopped (SIGSTOP) counts as alive."""
    try:
        return pid.isdigit() and b"elasti" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _open_lock(path: Path, create: int = 0) -> int:
    return os.open(path, os.O_RDWR | create | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def kill_what_it_left(folder: Path) -> bool:
    """Workers of an agent that was killed together with its warden. Returns whether nothing of it lives."""
    with contextlib.suppress(OSError):
        nonce = (folder / "nonce").read_text()
        if nonce and not kill_everything(nonce, [], deadline=time.monotonic() + _SWEEP_SECONDS):
            logger.warning("processes of the killed agent %s cannot be killed", folder.name)
            return False
    return True


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
