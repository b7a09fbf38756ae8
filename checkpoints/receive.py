"""Take in a peer's checkpoint: as a committed one of this directory, by the way every commit goes, or set aside for the
length of one restore."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import mmap
import time

from . import manifest as manifests
from .errors import CorruptCheckpointError
from .manifest import MANIFEST, Manifest, step_name
from .publish import discard, publish, read_whole, working_directory
from .shards import copy_shard
from .storage import Readable, Storage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """Where a received copy goes. `round` is the round that receives it: a later one sweeps what is left of it."""

    directory: str
    round: int
    nonce: str


def read_manifest(peer: Readable, commit: str) -> Manifest:
    """The sender's manifest of that commit.

    Raises:
        CorruptCheckpointError: it did not come, or is damaged or another one.
    """
    try:
        with peer.open(peer.join("", MANIFEST)) as stream:
            data = stream.read()
    except OSError as exc:
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read: {exc}") from exc
    manifest = manifests.parse(data)
    if manifest.commit != commit:
        raise CorruptCheckpointError(f"{MANIFEST} is of the commit {manifest.commit}, not {commit}")
    for file in manifest.files:
        if "/" in file.name or file.name.startswith(".") or file.name == MANIFEST or file.bytes < 1:
            raise CorruptCheckpointError(f"{MANIFEST} names a file {file.name!r} of {file.bytes} bytes")
    return manifest


def receive(peer: Readable, commit: str, storage: Storage, inbox: Inbox) -> str:
    """Bring `commit` from `peer` into the directory, durably, unless it is there; returns its path.

    One shard at a time passes through memory and is verified before a byte of it is written.

    Raises:
        CorruptCheckpointError: the sender failed, or sent what does not verify.
        OSError, MemoryError: it cannot be kept here.
    """
    manifest = read_manifest(peer, commit)
    path = storage.join(inbox.directory, step_name(manifest.step))
    existing = read_whole(storage, path) if step_name(manifest.step) in storage.names(inbox.directory) else None
    if existing is not None and existing.commit == commit:
        return path
    if existing is not None and existing.round > manifest.round:
        raise FileExistsError(errno.EEXIST, f"holds the step as round {existing.round} has it", path)
    started = time.monotonic()
    working = working_directory(storage, inbox.directory, manifest.step, inbox.round, inbox.nonce)
    try:
        storage.make_directory(working)
        _write_files(peer, manifest, storage, working)
        path = publish(storage, inbox.directory, working, manifest, received_as=inbox.nonce)
    except BaseException:
        with contextlib.suppress(OSError):
            discard(storage, working, inbox.nonce)
        raise
    seconds = time.monotonic() - started
    logger.info("%s came from a peer: %d bytes, %.0f MB/s", path, manifest.bytes, manifest.bytes / 1e6 / seconds)
    return path


def receive_aside(peer: Readable, commit: str, storage: Storage, path: str) -> None:
    """Bring `commit` from `peer` to `path`, which nobody takes for a checkpoint. Raises as `receive` does."""
    manifest = read_manifest(peer, commit)
    storage.make_directory(path)
    _write_files(peer, manifest, storage, path)
    storage.write(storage.join(path, MANIFEST), manifests.dump(manifest))


def _write_files(peer: Readable, manifest: Manifest, storage: Storage, working: str) -> None:
    memory = mmap.mmap(-1, max(file.bytes for file in manifest.files))  # aligned: written past the page cache
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    for file in manifest.files:
        shard = memoryview(memory)[: file.bytes]
        copy_shard(peer, "", file, shard)
        storage.write(storage.join(working, file.name), shard)
