"""The block of shared memory between one worker and its agent: progress one way, a request word the other.

One memory-mapped file per local rank and round, made by the agent before the worker starts and named to it in
`ELASTICD_PROGRESS`. It is heartbeat and metrics source at once; nothing else flows between the two while training runs.

Layout, in native byte order:

    0     magic, schema digest         written once by `create`
    64    request line                 written by the agent alone: drain flag, number of saves and of profiles asked for
    128   slot 0                       sequence, fields, crc32 of both
    ...   slot 1                       the same
    ...   two slots of timings         sequence, histograms (elastic.timings), crc32; written once a step

A writer fills the older slot, so that one killed in the middle of a write (SIGKILL comes at any instruction) leaves the
other slot whole, and a reader takes the valid slot with the higher sequence. No lock crosses the process boundary.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.timings import FORMAT as TIMINGS_FORMAT
from elastic.timings import SCHEMA as TIMINGS_SCHEMA
from elastic.timings import Timings, TimingsWriter, from_values

ENVIRONMENT_KEY = "ELASTICD_PROGRESS"


class Phase(enum.IntEnum):
    """What a worker is doing; phases are disjoint."""

    STARTING = 0
    RESTORE = 1
    DATA = 2
    FORWARD_BACKWARD = 3
    COMM_EXPOSED = 4
    OPTIMIZER = 5
    CHECKPOINT = 6
    EVALUATION = 7
    COMPILE = 8
    DRAINING = 9


class Outcome(enum.IntEnum):
    """How a worker's training loop ended; the agent tells finished from drained by this, not by the exit code."""

    NONE = 0
    FINISHED = 1
    DRAINED = 2
    FATAL = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a worker says of itself. Times are CLOCK_MONOTONIC seconds unless named `unix`; -1 means not known yet.

    What is named `_total` counts from 0 in each process and never falls; who adds up carries it over the rounds.
    """

    pid: int = 0
    round: int = 0
    rank: int = -1
    local_rank: int = -1
    world_size: int = 0
    heartbeat: float = 0.0  # last report of any kind, from any thread
    progressed_at: float = 0.0  # last sign of the training thread: a step, a phase, an exchange
    phase: int = Phase.STARTING
    phase_since: float = 0.0
    phase_limit: float = 0.0  # seconds that this phase may take without a sign; 0 = the agent's rule
    waits: int = 0  # 1 while the training thread waits for peers, whatever its phase
    in_loop: int = 0  # 1 from the moment the training loop is entered: a drain request will be seen
    outcome: int = Outcome.NONE
    step: int = -1  # last optimizer step that was applied
    base_step: int = -1  # the step this round started from
    epoch: int = 0
    micro_step: int = 0  # within the current step
    samples_total: int = 0  # that this rank has run itself, repeated ones included
    tokens_total: int = 0
    skipped_steps_total: int = 0  # of the whole job, counted by rank 0 alone
    loss: float = float("nan")
    learning_rate: float = float("nan")
    grad_norm: float = float("nan")
    disk_step: int = -1  # newest step committed to disk, as far as this rank knows
    memory_step: int = -1  # newest that this rank has sealed its share of; -1 also while its memory is off
    memory_unix_time: float = 0.0
    memory_failures_total: int = 0
    memory_bytes_total: int = 0
    commit_unix_time: float = 0.0
    checkpoint_failures_total: int = 0  # of the whole job, counted by rank 0 alone
    failed_saves: int = 0  # one after another, since the newest commit of this process
    checkpoint_bytes_total: int = 0
    checkpoint_stall_seconds_total: float = 0.0
    checkpoint_write_seconds_total: float = 0.0
    started_at: float = 0.0  # the user's program began
    restore_began_at: float = 0.0
    restore_ended_at: float = 0.0
    first_step_at: float = 0.0  # first new step of the round was applied
    weights_bytes: int = -1  # on this rank, by their tensors
    gradients_bytes: int = -1
    optimizer_bytes: int = -1
    activations_bytes: int = -1  # the peak above these three; of a device's allocator alone
    device_allocated_bytes: int = -1
    device_reserved_bytes: int = -1
    device_peak_bytes: int = -1
    alloc_retries_total: int = 0
    ooms_total: int = 0
    comm_bytes_total: int = 0  # gradients; seconds: some reduction was under way
    comm_seconds_total: float = 0.0
    comm_exposed_seconds_total: float = 0.0
    grad_syncs_total: int = 0
    grad_syncs_skipped_total: int = 0
    broadcast_bytes_total: int = 0  # buffers
    broadcast_seconds_total: float = 0.0
    bus_bandwidth: float = float("nan")  # bytes/s of the newest reductions, as nccl-tests counts it
    step_seconds: float = 0.0  # duration of the last step
    compute_seconds: float = 0.0  # per micro-batch, data and forward and backward, as last compared; 0 = not yet
    slowdown: float = 0.0  # that, relative to the median of all ranks


_FIELDS = tuple(f.name for f in dataclasses.fields(Progress))
_PLACES = {name: i for i, name in enumerate(_FIELDS, start=1)}  # in the image, in words of 8 bytes; 0: the sequence
_IS_INT = tuple(f.type in ("int", int) for f in dataclasses.fields(Progress))
_INT_FIELDS = {name for name, is_int in zip(_FIELDS, _IS_INT, strict=True) if is_int}
_BODY = struct.Struct("=Q" + "".join("q" if is_int else "d" for is_int in _IS_INT))
_HEARTBEAT = _PLACES["heartbeat"]
_CRC = struct.Struct("=I")
_MAGIC = struct.Struct("=8sI")
_FIELD_TYPES = ",".join(f"{name}:{'q' if i else 'd'}" for name, i in zip(_FIELDS, _IS_INT, strict=True))
_SCHEMA = zlib.crc32(f"{_FIELD_TYPES};{TIMINGS_SCHEMA}".encode())
_HEADER = (b"elasticd", _SCHEMA)
_REQUEST_OFFSET = 64
_SLOT_OFFSET = 128
_SLOT_BYTES = (_BODY.size + _CRC.size + 63) // 64 * 64
_TIMINGS = struct.Struct("=Q" + TIMINGS_FORMAT)
_TIMINGS_OFFSET = _SLOT_OFFSET + 2 * _SLOT_BYTES
_TIMINGS_SLOT_BYTES = (_TIMINGS.size + _CRC.size + 63) // 64 * 64
BLOCK_BYTES = _TIMINGS_OFFSET + 2 * _TIMINGS_SLOT_BYTES


def create(path: Path) -> None:
    """Make an empty block at `path`, readable by its owner alone. Called by the agent before the worker starts."""
    path.unlink(missing_ok=True)  # half of one that did not fit
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, BLOCK_BYTES)
        os.pwrite(descriptor, _MAGIC.pack(*_HEADER), 0)
    except OSError as exc:
        raise OSError(exc.errno, f"{exc.strerror}; the runtime directory needs room", str(path)) from exc
    finally:
        os.close(descriptor)


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != BLOCK_BYTES:
            raise ValueError(f"progress block {path} has the wrong size: made by another version of elasticd")
        block = mmap.mmap(descriptor, BLOCK_BYTES)
    finally:
        os.close(descriptor)
    if _MAGIC.unpack_from(block, 0) != _HEADER:
        block.close()
        raise ValueError(f"progress block {path} has another schema: made by another version of elasticd")
    return block


def _read_slot(block: mmap.mmap, start: int, body: struct.Struct) -> tuple[int, tuple[Any, ...]] | None:
    """Sequence and values of one slot, (0, ...) when it was never written, or None when it is torn."""
    raw = block[start : start + body.size + _CRC.size]
    (crc,) = _CRC.unpack_from(raw, body.size)
    sequence, *values = body.unpack_from(raw)
    if sequence == 0 and crc == 0:
        return 0, ()
    return (sequence, tuple(values)) if crc == zlib.crc32(raw[: body.size]) else None


def _newest(block: mmap.mmap, start: int, stride: int, body: struct.Struct) -> tuple[int, tuple[Any, ...]] | None:
    """The whole slot with the higher sequence; sequence 0 before the first report, None when both are torn."""
    slots = [_read_slot(block, place, body) for place in (start, start + stride)]
    written = [slot for slot in slots if slot is not None and slot[0]]
    if written:
        return max(written, key=lambda slot: slot[0])
    return (0, ()) if (0, ()) in slots else None


class ProgressReader:
    """The agent's side: reads progress, writes requests."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._block = _map(path)
        self._requests = memoryview(self._block)[_REQUEST_OFFSET : _REQUEST_OFFSET + 64].cast("Q")
        self.is_damaged = False  # as last read: cut, or with both slots torn

    def read(self) -> Progress | None:
        """The newest whole report; None before the first one, or when the block is damaged."""
        newest = _newest(self._block, _SLOT_OFFSET, _SLOT_BYTES, _BODY) if self._is_whole() else None
        self.is_damaged = newest is None
        if newest is None or not newest[0]:
            return None
        return Progress(**dict(zip(_FIELDS, newest[1], strict=True)))

    def read_timings(self) -> Timings | None:
        """The newest whole histograms; None before the first ones, or when they are damaged."""
        if not self._is_whole():
            return None
        newest = _newest(self._block, _TIMINGS_OFFSET, _TIMINGS_SLOT_BYTES, _TIMINGS)
        return from_values(newest[1]) if newest is not None and newest[0] else None

    def _is_whole(self) -> bool:
        """A worker may do anything to its file; to touch a page that it cut off would be the agent's death (SIGBUS)."""
        return os.fstat(self._descriptor).st_size >= BLOCK_BYTES

    def request_drain(self) -> None:
        """Ask the worker to save and leave after the next step that all ranks agree on."""
        if self._is_whole():
            self._requests[0] = 1

    def request_save(self) -> None:
        """Ask the worker to commit a checkpoint at the next step and go on."""
        if self._is_whole():
            self._requests[1] += 1

    def request_profile(self) -> None:
        """Tell the worker that there is an order beside the block: see `elastic.profile_order`."""
        if self._is_whole():
            self._requests[2] += 1

    def close(self) -> None:
        self._requests.release()
        self._block.close()
        os.close(self._descriptor)


class _Image:
    """What is going to stand in a slot: sequence, body and checksum, changed in place and then copied whole."""

    def __init__(self, block: mmap.mmap, start: int, stride: int, body: struct.Struct) -> None:
        self._block, self._start, self._stride, self._end = block, start, stride, body.size
        self._bytes = bytearray(body.size + _CRC.size)
        self.body = memoryview(self._bytes)[: body.size]
        self._sequence = self.body[:8].cast("Q")

    def publish(self) -> None:
        """Into the older slot."""
        self._sequence[0] = sequence = self._sequence[0] + 1
        _CRC.pack_into(self._bytes, self._end, zlib.crc32(self.body))
        start = self._start + (sequence % 2) * self._stride
        self._block[start : start + len(self._bytes)] = self._bytes


class ProgressWriter:
    """The worker's side. Its threads share one lock; the newest value of every field is kept and written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._block = _map(path)
        self._requests = memoryview(self._block)[_REQUEST_OFFSET : _REQUEST_OFFSET + 64].cast("Q")
        self._lock = threading.Lock()
        self._image = _Image(self._block, _SLOT_OFFSET, _SLOT_BYTES, _BODY)
        _BODY.pack_into(self._image.body, 0, 0, *(f.default for f in dataclasses.fields(Progress)))
        ints: Any = self._image.body.cast("q")
        self._floats = self._image.body.cast("d")
        self._places = {n: (ints if n in _INT_FIELDS else self._floats, place) for n, place in _PLACES.items()}
        self._timings_image = _Image(self._block, _TIMINGS_OFFSET, _TIMINGS_SLOT_BYTES, _TIMINGS)
        self._timings = TimingsWriter(self._timings_image.body[8:])

    def update(self, **fields: float) -> None:
        """Set some fields and the heartbeat, and publish. Costs a few microseconds; any thread may call it."""
        places = self._places
        with self._lock:
            for name, value in fields.items():
                words, place = places[name]
                words[place] = value
            self._floats[_HEARTBEAT] = time.monotonic()
            self._image.publish()

    def add(self, **amounts: float) -> None:
        """Increase some fields by the given amounts and publish."""
        with self._lock:
            for name, amount in amounts.items():
                words, place = self._places[name]
                words[place] += amount
            self._image.publish()

    def observe(self, seconds: Mapping[str, float]) -> None:
        """Count durations into the histograms, by the names of `elastic.timings.WORKER_TIMINGS`, and publish."""
        with self._lock:
            self._timings.observe(seconds)
            self._timings_image.publish()

    @property
    def drain_requested(self) -> bool:
        return bool(self._requests[0])

    @property
    def saves_requested(self) -> int:
        """How many saves the agent has asked for since the block was made."""
        return int(self._requests[1])

    @property
    def profiles_requested(self) -> int:
        """How many profiles the agent has asked for since the block was made."""
        return int(self._requests[2])

    def close(self) -> None:
        with self._lock:
            self._requests.release()
            self._block.close()
