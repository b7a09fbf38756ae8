"""State -> this rank's share, copied into a buffer: the only moment training waits for a checkpoint.

Owns the copy and nothing after it. The buffer is then the image of the shard file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import manifest as manifests
from .errors import UnsupportedStateError
from .manifest import Piece, TensorEntry
from .shards import SMALLEST_CUT_BYTES, Layout, layout, partition
from .staging import Buffer, StagingBuffer
from .tree import Nested, dtype_name, flatten

_HEADER_ROOM_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the state looks like and which part of it this rank writes; the same tables on every rank."""

    tensors: tuple[TensorEntry, ...]
    pieces: tuple[Piece, ...]
    layout: Layout
    digest: str  # of the tables: ranks whose states differ in form must not commit together
    writer: int
    writers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A plan, and what is not tensors."""

    plan: Plan
    skeleton: Any


class Planner:
    """Makes plans, and keeps one for as long as the state's form stays the same."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def plan(self, state: Nested, *, writer: int, writers: int) -> tuple[Snapshot, list[torch.Tensor]]:
        """How the state is laid out, and its tensors in the order of the plan's table.

        Raises:
            UnsupportedStateError
        """
        skeleton, tensors = flatten(state)
        entries = describe(tensors)
        plan = self._plan
        if plan is None or (plan.tensors, plan.writer, plan.writers) != (entries, writer, writers):
            plan = self._plan = make_plan(entries, writer=writer, writers=writers)
        return Snapshot(plan=plan, skeleton=skeleton), list(tensors.values())


class Snapshotter:
    """Takes snapshots into one buffer of this process."""

    def __init__(self) -> None:
        self.buffer = StagingBuffer()
        self._planner = Planner()

    def take(self, state: Nested, *, writer: int, writers: int) -> Snapshot:
        """Copy the share of writer number `writer`. When this returns, the live state may change again.

        Raises:
            UnsupportedStateError: before anything is copied.
        """
        snapshot, tensors = self._planner.plan(state, writer=writer, writers=writers)
        fill(self.buffer, self.buffer.reserve(snapshot.plan.layout.size_bytes), tensors, snapshot.plan)
        return snapshot

    def expect(self, stored_bytes: int, writers: int) -> None:
        """Ready the buffer for a state of this size, while the caller goes on."""
        if stored_bytes:
            self.buffer.warm(stored_bytes // writers + SMALLEST_CUT_BYTES + _HEADER_ROOM_BYTES)

    def close(self) -> None:
        self.buffer.close()


def fill(buffer: Buffer, target: torch.Tensor, tensors: Sequence[torch.Tensor], plan: Plan) -> None:
    """Make `target`, a part of `buffer`, the image of the plan's shard file."""
    if any(tensor.is_cuda for tensor in tensors):
        buffer.pin()
    target[: len(plan.layout.header)] = torch.frombuffer(bytearray(plan.layout.header), dtype=torch.uint8)
    _copy(tensors, plan, target)


def stored_bytes(state: Nested) -> int:
    """About how many bytes a state will take; 0 when it cannot be stored, which its save will say."""
    try:
        return sum(entry.stored_bytes for entry in describe(flatten(state)[1]))
    except UnsupportedStateError:
        return 0


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """The table of tensors; one that is the same memory as an earlier one (tied weights) is stored once."""
    seen: dict[tuple[Any, ...], str] = {}
    entries = []
    for name, tensor in tensors.items():
        same_as = None
        if tensor.numel():
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
            same_as = seen.setdefault(identity, name)
        entries.append(
            TensorEntry(
                name=name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                same_as=None if same_as == name else same_as,
            )
        )
    return tuple(entries)


def make_plan(entries: tuple[TensorEntry, ...], *, writer: int, writers: int) -> Plan:
    pieces = partition(entries, writers)
    table = repr([(t.name, t.dtype, t.shape, t.same_as) for t in entries]).encode()
    return Plan(
        tensors=entries,
        pieces=pieces,
        layout=layout(entries, pieces, writer),
        digest=manifests.checksum(table),
        writer=writer,
        writers=writers,
    )


def _copy(tensors: Sequence[torch.Tensor], plan: Plan, target: torch.Tensor) -> None:
    devices = set()
    for piece, offset in zip(plan.layout.pieces, plan.layout.offsets, strict=True):
        source = tensors[piece.tensor].detach()
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()
        size = (piece.end - piece.begin) * source.element_size()
        room = target[offset : offset + size]
        if source.is_contiguous():
            flat = source.view(-1)[piece.begin : piece.end].view(torch.uint8)
            room.copy_(flat, non_blocking=True)
        elif piece.begin == 0 and piece.end == source.numel():
            room.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
        else:
            room.view(source.dtype).copy_(source.reshape(-1)[piece.begin : piece.end], non_blocking=True)
        if source.is_cuda:
            devices.add(source.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
