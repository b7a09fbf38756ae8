"""Room and speed for checkpoints: shared memory, and the directory they are committed to."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.checks.finding import Finding, error, ok, warning
from elastic.own_checkpoints import own_checkpoints

PROBE_BYTES = 64 << 20
_KEPT = 4  # what retention keeps (3), and the one that is being written
_COPIES = 3  # two in memory, and one that is on its way to disk
_LEAST_SHM_BYTES = 1 << 30
_SLOW_BYTES_PER_SECOND = 50e6
_CHUNK = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A measured write with its fsync."""

    bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.bytes / self.seconds


def check_shm(path: Path, *, used: bool, state_bytes: int | None) -> Iterator[Finding]:
    """`state_bytes`: of the newest checkpoint; None where there is none. NCCL and data loaders use it as well."""
    try:
        room = os.statvfs(path)
    except OSError as exc:
        yield error("shared memory", f"{path}: {exc.strerror}", "mount a tmpfs there")
        return
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    shown = f"{path}: {_gb(free)} free of {_gb(total)}"
    if not os.access(path, os.W_OK | os.X_OK):
        yield error("shared memory", f"{path} is not writable by this user", f"chmod 1777 {path}")
        return
    need = _COPIES * state_bytes if used and state_bytes else _LEAST_SHM_BYTES
    if free >= need:
        yield ok("shared memory", shown)
    elif used and state_bytes:
        message = f"{shown}; checkpoints in memory need up to {_gb(need)} ({_COPIES} x {_gb(state_bytes)})"
        yield warning("shared memory", message, f"mount -o remount,size=... {path}, or docker --shm-size")
    else:
        message = f"{shown}; data loaders, NCCL and checkpoints in memory want more than {_gb(_LEAST_SHM_BYTES)}"
        yield warning("shared memory", message, f"mount -o remount,size=... {path}, or docker --shm-size")


def check_directory(directory: str | None, state_bytes: int | None) -> Iterator[Finding]:
    """Whether checkpoints can be written there, how many, and how fast: 64 MB are written and removed again."""
    if directory is None:
        yield warning("checkpoints", "no --checkpoint-dir: the state is kept in memory at most", "--checkpoint-dir DIR")
        return
    if "://" in directory:
        yield ok("checkpoints", f"{directory} is an object store; its speed is not measured")
        return
    place = _nearest(Path(directory))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield error("checkpoints", f"{place} is not a directory that this user can write to", "chown it, or give "
                    "another --checkpoint-dir")  # fmt: skip
        return
    yield _room(directory, place, state_bytes)
    yield _speed(place)


def newest_state_bytes(directory: str | None) -> int | None:
    """The size of the newest committed checkpoint; None where there is none, or it lies in an object store."""
    if directory is None or "://" in directory or not Path(directory).is_dir():
        return None
    entries = own_checkpoints("catalog").list_checkpoints(directory)
    sizes = [int(entry["bytes"]) for entry in entries if entry["state"] == "committed" and entry["bytes"]]
    return sizes[-1] if sizes else None


def measure(place: Path, size: int = PROBE_BYTES) -> Speed:
    """Write and fsync a file that is gone afterwards, also when this process is killed. Raises: OSError."""
    chunk = secrets.token_bytes(_CHUNK)  # what compresses would be written faster than checkpoints are
    descriptor = _unnamed(place)
    try:
        began = time.monotonic()
        for _ in range(size // _CHUNK):
            os.write(descriptor, chunk)
        os.fsync(descriptor)
        return Speed(bytes=size // _CHUNK * _CHUNK, seconds=max(time.monotonic() - began, 1e-9))
    finally:
        os.close(descriptor)


def _room(directory: str, place: Path, state_bytes: int | None) -> Finding:
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    there = "" if place == Path(directory) else f" ({directory} will be made)"
    message = f"{place}: {_gb(free)} free{there}"
    if not room.f_favail and room.f_files:
        return error("checkpoints", f"{place}: no inodes are free", "remove files there")
    if state_bytes is None:
        return ok("checkpoints", message) if free > PROBE_BYTES else error("checkpoints", message, "make room there")
    wanted = f"{message}; {_KEPT} checkpoints of {_gb(state_bytes)} need {_gb(_KEPT * state_bytes)}"
    if free < state_bytes:
        return error("checkpoints", wanted, f"make room: elasticd checkpoints prune {directory}")
    if free < _KEPT * state_bytes:
        return warning("checkpoints", wanted, "the oldest are removed as new ones come; more room is safer")
    return ok("checkpoints", message)


def _speed(place: Path) -> Finding:
    try:
        speed = measure(place)
    except OSError as exc:
        return error("checkpoint speed", f"{place}: writing 64 MB: {exc.strerror or exc}", "look at the disk and quota")
    message = f"{place}: {speed.per_second / 1e6:.0f} MB/s written and synced ({speed.bytes >> 20} MiB)"
    if speed.per_second < _SLOW_BYTES_PER_SECOND:
        return warning("checkpoint speed", message, "save less often, or use a faster disk: training does not wait "
                       "for it, a drain does")  # fmt: skip
    return ok("checkpoint speed", message)


def _nearest(path: Path) -> Path:
    """The directory itself, or what would be its nearest parent that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _unnamed(place: Path) -> int:
    """A file without a name, where the file system can (NFS and some overlays cannot); else one unlinked at once."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(place, flags | getattr(os, "O_TMPFILE", 0), 0o600)  # without it: a directory cannot be written
    except OSError:
        path = place / f".doctor-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return descriptor


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
