"""The lock that keeps a checkpoint directory for one job, on one host or wherever its file system shares locks.

It is two files. The one in the runtime directory, under the directory's name, counts for this host whatever becomes of
the directory: it may be a URL, read-only for an hour, or on a file system without `flock`. The one in the directory
itself counts whatever path, user or host leads there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import pwd
import stat
import time
from collections.abc import Callable
from pathlib import Path

from elastic.agent.leftovers import holders, is_being_killed
from elastic.errors import UsageError
from elastic.own_checkpoints import own_checkpoints
from elastic.passing import is_away, is_full, lacks_room

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 15.0
_PAUSE_SECONDS = 0.05
_WORD_BYTES = 1024
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # what opening a link, a directory, a socket says


class JobLock:
    """Held from the constructor on. The files say whose it is: a pid, or the run id of a job of many agents."""

    def __init__(
        self, checkpoint_dir: str, runtime: Path, *, run_id: str | None, pause: Callable[[float], object] = time.sleep
    ) -> None:
        """`run_id`: of a job whose agents share the directory; None: this agent is all there is of the job.

        An agent that was just killed may still have a warden at work on its workers, so wait for a while, by `pause`.
        They hold it as well, in case the warden was killed in the same instant.

        Raises:
            UsageError: another job has the directory, or may have it.
            OSError: its file server is away, or keeps killed workers from ending.
            whatever `pause` raises.
        """
        self._directory = checkpoint_dir
        self._is_shared = run_id is not None
        self._word = str(os.getpid()) if run_id is None else f"job {run_id}"
        self._files: list[_LockFile] = []
        try:
            own = _open_own(checkpoint_dir)
            self._files = [own] if own else []
            self._files.insert(0, _LockFile(_open_for_host(checkpoint_dir, runtime)))
            for file in list(self._files):
                try:
                    self._wait_for(file, time.monotonic() + _WAIT_SECONDS, pause)
                except OSError as exc:  # Lustre without `flock`, NFS without lockd
                    if file is not own or is_away(exc):
                        raise
                    _warn(checkpoint_dir, exc)
                    self._files.remove(own)
                    own.close()
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For the warden and the workers to inherit."""
        return tuple(file.descriptor for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close(forget=not self._is_shared)
        self._files = []

    def _wait_for(self, file: _LockFile, deadline: float, pause: Callable[[float], object]) -> None:
        has_said = False
        while True:
            is_late = time.monotonic() >= deadline
            if file.take(self._word, is_shared=self._is_shared, or_nameless=is_late):
                return
            holder = file.read()
            who = holder if holder.startswith("job ") else f"agent with pid {holder or 'unknown'}"
            if _is_running(holder) or is_late:
                has_gone = not holder.startswith("job ") and not _is_running(holder)
                raise _in_use(self._directory, who, holders(file.descriptor) if has_gone else [])
            if not has_said:
                has_said = True
                logger.info("--checkpoint-dir %s: waiting for what the %s has left to end", self._directory, who)
            pause(_PAUSE_SECONDS)  # the holder is dead and its warden is cleaning up


class _LockFile:
    """One of the files, open. That nothing can be written there is no obstacle: the lock counts, not the word."""

    def __init__(self, descriptor: int, path: Path | None = None) -> None:
        """`path`: of one that belongs to somebody else, who alone may write there."""
        self.descriptor = descriptor
        self._foreign = path
        self._is_held = False

    def take(self, word: str, *, is_shared: bool, or_nameless: bool) -> bool:
        """One attempt. Who has it alone may say whose it is; the word stands while anybody has it.

        `or_nameless`: share it also with somebody who had no room to say whose it is.

        Raises: UsageError: it cannot be made to say whose it is. OSError: there are no locks here.
        """
        is_alone = self._try(fcntl.LOCK_EX)
        if is_alone:
            self._write(word)
        if not is_shared:
            self._is_held = is_alone
            return is_alone
        if is_alone and self._foreign is not None and self.read() not in (word, ""):
            raise _not_ours(self._foreign, f"written by this user, and says that it is of {self.read()}")
        accepted = (word, "") if is_alone or or_nameless else (word,)
        if self._try(fcntl.LOCK_SH) and self.read() in accepted:  # on the way down somebody else may have had it
            self._is_held = True
            return True
        self._try(fcntl.LOCK_UN)
        return False

    def read(self) -> str:
        with contextlib.suppress(OSError):
            return os.pread(self.descriptor, _WORD_BYTES, 0).decode(errors="replace").strip()
        return ""

    def close(self, *, forget: bool = False) -> None:
        if forget and self._is_held:
            self._write("")
        os.close(self.descriptor)

    def _write(self, word: str) -> None:
        """Over what is there, and never down to nothing: on a full disk there is no room but that of the last word."""
        data = word.encode() + b"\n"
        try:
            os.pwrite(self.descriptor, data, 0)
            os.ftruncate(self.descriptor, len(data))
        except OSError as exc:
            logger.debug("a lock of --checkpoint-dir cannot say whose it is: %s", exc)
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)  # nothing rather than somebody else's

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno == errno.EBADF and self._foreign is not None:  # NFS locks alone what it may write alone
                raise _not_ours(self._foreign, "written by this user") from exc
            raise
        return True


def _open_for_host(checkpoint_dir: str, runtime: Path) -> int:
    local = own_checkpoints("storage").local_path(checkpoint_dir)
    name = checkpoint_dir.rstrip("/") if local is None else os.path.realpath(local)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return os.open(runtime / f"job-{digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _open_own(checkpoint_dir: str) -> _LockFile | None:
    """The directory's own file; None where it can have none. Raises: as `JobLock`."""
    local = own_checkpoints("storage").local_path(checkpoint_dir)
    if local is None:
        return None
    try:
        Path(local).mkdir(mode=0o750, parents=True, exist_ok=True)
        return _open_file(Path(local) / ".lock")
    except OSError as exc:
        if lacks_room(exc) or (is_away(exc) and not _can_be_read(local)):
            raise
        if not os.path.isdir(local) and not is_full(exc):  # noqa: PTH112 - never raises
            raise UsageError(
                f"--checkpoint-dir {checkpoint_dir} is not there and cannot be made: {exc.strerror or exc}; make it, "
                "for this user to write to, or give another one"
            ) from exc
        _warn(checkpoint_dir, exc)
        return None


def _can_be_read(folder: str) -> bool:
    """Whether it is there, though it may not take a file: of a disk that fails to write, training reads what it has."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        next(entries, None)
        return True
    return False


def _open_file(path: Path) -> _LockFile:
    """Only a file: whoever may write the directory can have put a link there, or a pipe that would be waited for.

    Another user's is opened for reading, which is all that `flock` needs. Raises: UsageError, OSError.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    foreign = None
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as exc:
            if exc.errno not in _NOT_WRITABLE or not os.path.lexists(path):
                raise
            descriptor, foreign = os.open(path, os.O_RDONLY | flags), path
    except OSError as exc:
        if exc.errno in _NO_FILE:
            raise _no_file(path) from exc
        if exc.errno == errno.EACCES and os.path.lexists(path):
            raise _not_ours(path, "read by this user") from exc
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _no_file(path)
        _open_to_readers(descriptor, path.parent)
    except BaseException:
        os.close(descriptor)
        raise
    return _LockFile(descriptor, foreign)


def _open_to_readers(descriptor: int, folder: Path) -> None:
    """Whoever may write to the directory may find out that it is in use; its group may write there as well."""
    found, above = os.fstat(descriptor), folder.stat()
    if found.st_uid == os.geteuid():
        group = above.st_mode & stat.S_IWGRP if above.st_gid == found.st_gid else 0
        others = stat.S_IROTH if above.st_mode & stat.S_IWOTH else 0
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o640 | group | others)


def _no_file(path: Path) -> UsageError:
    return UsageError(f"--checkpoint-dir {path.parent}: {path} is a link, a pipe or a directory, not a file: remove it")


def _not_ours(path: Path, what: str) -> UsageError:
    found = path.lstat()
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = f"uid {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return UsageError(
        f"--checkpoint-dir {path.parent}: {path} belongs to {owner} (mode {mode:04o}) and cannot be {what}: a job of "
        f"{owner} may be using the directory. Give this job one of its own, or have {owner} remove the file once no "
        "job does"
    )


def _warn(checkpoint_dir: str, why: OSError) -> None:
    logger.warning(
        "--checkpoint-dir %s cannot hold a lock: %s; agents of this host and runtime directory alone are kept apart",
        checkpoint_dir,
        why.strerror or why,
    )


def _in_use(directory: str, who: str, left: list[int]) -> Exception:
    """Who has it, and what to do about that. `left`: of an agent that is gone."""
    if not left:
        return UsageError(
            f"--checkpoint-dir {directory} is in use by the {who}: drain that one first (`elasticd drain`), or give "
            "this job a directory of its own"
        )
    pids = " ".join(map(str, left))
    if all(map(is_being_killed, left)):  # it ends as soon as its disk or its device answers
        return OSError(errno.ETIMEDOUT, f"killed workers (pid {pids}) do not end, and hold it until they do")
    return UsageError(
        f"--checkpoint-dir {directory} is in use by what the {who}, which is gone, has left behind: end it "
        f"(`kill -9 {pids}`) and start again; with the RUNTIME_DIRECTORY of that agent a start does so itself"
    )


def _is_running(pid: str) -> bool:
    """Whether another live elasticd agent has this pid; one that is stopped (SIGSTOP) counts as alive.

    Our own is the word of one that is dead, or lives in another container.
    """
    try:
        return pid.isdigit() and int(pid) != os.getpid() and b"elasti" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False
