"""Durable file operations as one object, so that a fault can be one too.

Owns how bytes become durable: temporary names, O_DIRECT, fsync, rename. Knows nothing of what the files mean.
`Storage` is the contract; `LocalStorage` is a file system, `object_storage.ObjectStorage` whatever fsspec reaches by
URL.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from .errors import NoDriverError

PAGE_BYTES = 4096
CHUNK_BYTES = 16 << 20
DIRECT_FROM_BYTES = 1 << 20  # below this O_DIRECT gains nothing
FILE_MODE = 0o640
_FILE_SCHEMES = ("file", "local")  # fsspec's names for it
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Observer = Callable[[memoryview], Any]


class Readable(Protocol):
    """What reading a checkpoint needs of the place where it lies: a storage, or a peer that sends it."""

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading from its start; it gives its bytes by `readinto`."""

    def join(self, directory: str, *names: str) -> str: ...


class Storage(abc.ABC):
    """What a commit needs of a place for files. Paths are strings; every method may raise OSError."""

    renames: bool = True  # a directory can be renamed in one atomic step; otherwise the manifest is written last

    @abc.abstractmethod
    def make_directory(self, path: str) -> None:
        """Make `path` and its parents; it may be there already."""

    @abc.abstractmethod
    def make_new_directory(self, path: str) -> bool:
        """Make `path` in a directory that is there; False: it is there already. Of several callers one gets True.

        Where nothing `renames` everyone does.
        """

    @abc.abstractmethod
    def write(self, path: str, data: memoryview | bytes, observe: Observer | None = None) -> None:
        """Write a whole file. When this returns its bytes are durable, its name is once the directory is synced.

        `observe` sees every chunk once, in order, from this thread: a checksum taken while the other ranks write.
        """

    @abc.abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Put a small file in place of what is there, atomically and durably."""

    @abc.abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Rename a directory onto a name that is free."""

    @abc.abstractmethod
    def swap(self, first: str, second: str) -> bool:
        """Exchange two directories in one atomic step; False where the file system cannot."""

    @abc.abstractmethod
    def sync_directory(self, path: str) -> None:
        """Make the names in `path` durable."""

    @abc.abstractmethod
    def remove_tree(self, path: str) -> None:
        """Remove a directory and what is in it; nothing happens when it is not there."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; nothing happens when it is not there."""

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none when it is not there."""

    @abc.abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file, or None when there is no such file."""

    @abc.abstractmethod
    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading from its start."""

    def read(self, path: str) -> bytes:
        """A whole small file."""
        with self.open(path) as file:
            return file.read()

    def join(self, directory: str, *names: str) -> str:
        return "/".join([directory.rstrip("/") or "/", *names])


class LocalStorage(Storage):
    """A POSIX file system, local or shared."""

    def make_directory(self, path: str) -> None:
        Path(path).mkdir(mode=0o750, parents=True, exist_ok=True)

    def make_new_directory(self, path: str) -> bool:
        try:
            Path(path).mkdir(mode=0o750)
        except FileExistsError:
            return False
        return True

    def write(self, path: str, data: memoryview | bytes, observe: Observer | None = None) -> None:
        view = memoryview(data).cast("B")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            aligned = len(view) // PAGE_BYTES * PAGE_BYTES if _is_page_aligned(view) else 0
            done = _write_direct(descriptor, view[:aligned], observe) if aligned >= DIRECT_FROM_BYTES else 0
            _write_buffered(descriptor, view, done, observe)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, path: str, data: bytes) -> None:
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            self.write(temporary, data)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        self.sync_directory(str(Path(path).parent))

    def rename(self, source: str, target: str) -> None:
        Path(source).rename(target)

    def swap(self, first: str, second: str) -> bool:
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        raise OSError(code, os.strerror(code), first, None, second)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(entry.name for entry in Path(path).iterdir())
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int | None:
        try:
            status = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None  # to open a pipe would wait for its writer

    def open(self, path: str) -> IO[bytes]:
        return Path(path).open("rb", buffering=0)


def _is_page_aligned(view: memoryview) -> bool:
    if view.readonly or not len(view):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def _write_direct(descriptor: int, view: memoryview, observe: Observer | None) -> int:
    """Write whole pages past the page cache, as far as the file system lets us; returns the bytes written.

    The page cache would cost training ten times the CPU per commit. Where O_DIRECT is refused (some network and overlay
    file systems say so only at the write) the caller goes on buffered from where this stopped.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 0
    done = 0
    try:
        while done < len(view):
            chunk = view[done : done + CHUNK_BYTES]
            written = os.pwrite(descriptor, chunk, done)
            whole = written // PAGE_BYTES * PAGE_BYTES
            if observe is not None:
                observe(chunk[:whole])
            done += whole
            if whole < len(chunk) and whole == 0:
                break
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def _write_buffered(descriptor: int, view: memoryview, done: int, observe: Observer | None) -> None:
    while done < len(view):
        written = os.pwrite(descriptor, view[done : done + CHUNK_BYTES], done)
        if observe is not None:
            observe(view[done : done + written])
        done += written


def local_path(directory: str | os.PathLike[str]) -> str | None:
    """The absolute path of what a plain path, file:// or local:// names; None: it takes fsspec to reach it."""
    text = os.fspath(directory)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in _FILE_SCHEMES:
        return None
    return str(Path(rest if separator else text).absolute())


def open_storage(directory: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that reaches `directory`, and the directory as that storage names it.

    A plain path, a file:// or a local:// URL is a file system; any other URL goes through fsspec.

    Raises: NoDriverError: fsspec knows no such URL, or not without a package that is not installed.
    """
    text = os.fspath(directory)
    local = local_path(text)
    if local is not None:
        return LocalStorage(), local
    from .object_storage import ObjectStorage

    try:
        return ObjectStorage(text), text.rstrip("/")
    except (ImportError, ValueError) as exc:
        raise NoDriverError(f"{text}: {exc}") from exc
