"""The lock that keeps a checkpoint directory for one job, on one host or wherever its file system shares locks."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from pathlib import Path

from elastic.errors import UsageError

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 15.0
_PAUSE_SECONDS = 0.05
_WORD_BYTES = 1024


class JobLock:
    """Held from the constructor on. The file says whose it is: a pid, or the run id of a job of many agents."""

    def __init__(self, checkpoint_dir: str, runtime: Path, *, run_id: str | None) -> None:
        """`run_id`: of a job whose agents share the directory; None: this agent is all there is of the job.

        An agent that was just killed may still have a warden at work on its workers, so wait for a while.

        Raises: UsageError when another job has the directory.
        """
        self._is_shared = run_id is not None
        self._word = str(os.getpid()) if run_id is None else f"job {run_id}"
        self.descriptor = _open(checkpoint_dir, runtime)  # for the warden to inherit
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._is_taken():
            holder = self._read()
            if _is_running(holder) or time.monotonic() >= deadline:
                os.close(self.descriptor)
                who = holder if holder.startswith("job ") else f"agent with pid {holder or 'unknown'}"
                raise UsageError(
                    f"--checkpoint-dir {checkpoint_dir} is in use by the {who}: "
                    "drain that one first (`elasticd drain`), or give this job a directory of its own"
                )
            time.sleep(_PAUSE_SECONDS)  # the holder is dead and its warden is cleaning up

    def close(self) -> None:
        if not self._is_shared:
            os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)

    def _is_taken(self) -> bool:
        """One attempt. Who has it alone may say whose it is; the word stands while anybody has it."""
        is_alone = self._try(fcntl.LOCK_EX)
        if is_alone:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, self._word.encode(), 0)
        if not self._is_shared:
            return is_alone
        if self._try(fcntl.LOCK_SH) and self._read() == self._word:  # on the way down somebody else may have had it
            return True
        self._try(fcntl.LOCK_UN)
        return False

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _read(self) -> str:
        return os.pread(self.descriptor, _WORD_BYTES, 0).decode(errors="replace").strip()


def _open(checkpoint_dir: str, runtime: Path) -> int:
    """In the directory itself, so that it holds whatever path, user or runtime directory leads there.

    Where that cannot be (a URL, a read-only file system, Lustre without `flock`) it lies in the runtime directory,
    under the path's name.
    """
    if "://" not in checkpoint_dir:
        try:
            Path(checkpoint_dir).mkdir(mode=0o750, parents=True, exist_ok=True)
            descriptor = os.open(Path(checkpoint_dir) / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # nothing, but where locks are unknown
            except OSError:
                os.close(descriptor)
                raise
            return descriptor
        except OSError as exc:
            logger.warning("--checkpoint-dir %s cannot hold a lock: %s", checkpoint_dir, exc.strerror or exc)
    name = hashlib.sha256(os.path.realpath(checkpoint_dir).encode()).hexdigest()[:16]
    return os.open(runtime / f"job-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_running(pid: str) -> bool:
    """Whether a live elasticd agent has this pid; one that is stopped (SIGSTOP) counts as alive."""
    try:
        return pid.isdigit() and b"elasti" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
