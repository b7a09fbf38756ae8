"""One buffer of the memory tier: a file in shared memory that holds one local rank's share of one step.

    0      head: magic, bytes of the text, place and bytes of the image, checksum of each, checksum of all that
    4096   text: JSON, what this is a share of (`Text`); in writer 0's a second line for the whole state (`Words`)
    ...    image: the shard file as it would lie on disk, from a page boundary (of the kernel's: some have 64 KiB)

The magic is cleared before anything else is touched and written after everything else. So a process that is killed at
any instruction leaves a slot that is whole or one that says nothing, and never one that lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import io
import json
import mmap
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from . import strict
from .errors import CorruptCheckpointError
from .form import fill_in
from .manifest import CHECKSUM, TensorEntry
from .staging import Buffer, prefault
from .storage import PAGE_BYTES

_MAGIC = b"elastm02"  # one aligned word: it is there or it is not
_NOTHING = bytes(len(_MAGIC))
_GRAIN_BYTES = max(PAGE_BYTES, mmap.ALLOCATIONGRANULARITY)  # where a mapping may begin
_HEAD = struct.Struct("=8sQQQ16s16s")
_SEAL = struct.Struct("=Q")
FREE = (-1, -1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Whose step this is; the same on all ranks of the job."""

    run_id: str
    incarnation: str
    round: int
    base_step: int
    step: int
    samples: int
    fingerprint: str
    world_size: int
    nonce: str
    unix_time: float

    @property
    def state(self) -> str:
        """The same for all shares of one step that one manager kept."""
        return f"{self.nonce}m{self.step}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Which share of what. `digest` is of the state's form: shares of one state have the same."""

    mark: Mark
    writer: int
    writers: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """All of a state that is not bytes of tensors. Parsed for the one state that is restored: it may be long."""

    state: Any
    tensors: tuple[TensorEntry, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A slot that is whole, as far as its head and text go; the image is verified by who reads it."""

    path: Path
    text: Text
    words: bytes
    image_start: int
    image_bytes: int
    checksum: str


def slot_bytes(text_bytes: int, image_bytes: int) -> int:
    """What a slot takes; without an image, where that begins."""
    return -(-(PAGE_BYTES + text_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES + image_bytes


class Slot(Buffer):
    """The writer's side."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.age = FREE  # (round, step) of what lies here, sealed or not
        self.share = memoryview(b"")  # the image, as bytes
        self._text = b""
        self._image_start = 0

    def begin(self, mark: Mark, text: bytes, image_bytes: int) -> torch.Tensor:
        """Forget what is here and make room; returns the memory of the image. Raises: OSError."""
        self.share = memoryview(b"")
        memory = self.allocate(slot_bytes(len(text), image_bytes))
        self.clear()
        self.age = (mark.round, mark.step)
        self._text, self._image_start = text, slot_bytes(len(text), 0)
        self._write(PAGE_BYTES, text)
        self.share = self.view(image_bytes, self._image_start)
        return memory[self._image_start :]

    def seal(self, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """All bytes are there: from now on this is a whole share, `unless` a last look says no. Any thread."""
        head = _HEAD.pack(
            _MAGIC,
            len(self._text),
            self._image_start,
            len(self.share),
            xxhash.xxh3_128_digest(self._text),
            xxhash.xxh3_128_digest(self.share),
        )
        seal = _SEAL.pack(xxhash.xxh3_64_intdigest(head))
        if unless():
            return False
        self._write(len(_MAGIC), head[len(_MAGIC) :] + seal)
        self._write(0, _MAGIC)
        return True

    def clear(self) -> None:
        """Say nothing any more."""
        self._write(0, _NOTHING)
        self.age = FREE

    def _write(self, start: int, data: bytes) -> None:
        with self.view(len(data), start) as place:
            place[:] = data

    def _open(self, size_bytes: int) -> mmap.mmap:
        """What an earlier worker left in the file stays. Its pages are had before they are touched: no SIGBUS."""
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(self.path.lstat().st_mode):  # nothing of ours
                self.path.unlink()
        descriptor = _open_file(self.path, os.O_RDWR | os.O_CREAT)
        try:
            size_bytes = max(size_bytes, os.fstat(descriptor).st_size // PAGE_BYTES * PAGE_BYTES)
            os.posix_fallocate(descriptor, 0, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        prefault(memory)
        return memory


def _open_file(path: Path, flags: int) -> int:
    """Only a file: a pipe of that name would be waited for, a link leads elsewhere. Raises: OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return descriptor


def read_slot(path: Path) -> Share | None:
    """What lies in the slot; None while it says nothing.

    Raises:
        CorruptCheckpointError: it says something, and that is damaged.
        OSError
    """
    with open(_open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        raw = file.read(_HEAD.size + _SEAL.size)
        if len(raw) < _HEAD.size + _SEAL.size or raw[: len(_MAGIC)] == _NOTHING:
            return None
        magic, text_bytes, start, image_bytes, text_sum, image_sum = _HEAD.unpack_from(raw)
        sealed = _SEAL.unpack_from(raw, _HEAD.size)[0] == xxhash.xxh3_64_intdigest(raw[: _HEAD.size])
        if magic != _MAGIC or not sealed:
            raise CorruptCheckpointError(f"the head of {path} is damaged")
        file.seek(PAGE_BYTES)
        text = file.read(text_bytes)
    if xxhash.xxh3_128_digest(text) != text_sum:
        raise CorruptCheckpointError(f"the text of {path} is damaged")
    line, _, words = text.partition(b"\n")
    try:
        parsed = strict.build(Text, strict.loads(line))
    except ValueError as exc:
        raise CorruptCheckpointError(f"the text of {path}: {exc}") from exc
    return Share(
        path=path,
        text=parsed,
        words=words,
        image_start=start,
        image_bytes=image_bytes,
        checksum=CHECKSUM + image_sum.hex(),
    )


def parse_words(share: Share) -> Words:
    """Its checksum was verified and it is ours: types are not looked at again. Raises: CorruptCheckpointError."""
    try:
        words = json.loads(share.words)
        tensors = tuple(
            TensorEntry(name=name, dtype=dtype, shape=tuple(shape), same_as=same_as)
            for name, dtype, shape, same_as in words["tensors"]
        )
        return Words(state=fill_in(words["state"], words["leaves"]), tensors=tensors)
    except (ValueError, TypeError, LookupError) as exc:
        raise CorruptCheckpointError(f"the text of {share.path}: {exc}") from exc


class Window(io.RawIOBase):
    """The image of a share as a stream, read from where it lies: a system call per page would take twice as long."""

    def __init__(self, share: Share) -> None:
        with open(_open_file(share.path, os.O_RDWR), "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < share.image_start + share.image_bytes:
                raise CorruptCheckpointError(f"{share.path} is shorter than its head says")
            self._map = mmap.mmap(file.fileno(), share.image_bytes, offset=share.image_start)
        prefault(self._map, for_writing=False)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._at, self._left = 0, share.image_bytes

    @property
    def image(self) -> memoryview:
        """All of it, where it lies; from the start of a page."""
        return memoryview(self._map)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")[: self._left]
        if len(view):  # memmove leaves the interpreter to other threads meanwhile
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(view)), self._address + self._at, len(view))
        self._at, self._left = self._at + len(view), self._left - len(view)
        return len(view)
