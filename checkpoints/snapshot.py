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
    """Makes plans, and keeps one for as long as the state's form stays the same.

    A training loop saves the same tensors again and again: that they are the same is told from little.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._seen: list[tuple[Any, ...]] = []

    def plan(self, state: Nested, *, writer: int, writers: int) -> tuple[Snapshot, list[torch.Tensor]]:
        """How the state is laid out, and its tensors in the order of the plan's table.

        Raises:
            UnsupportedStateError
        """
        skeleton, tensors = flatten(state)
        seen = [(name, t.dtype, *_memory_of(t)) for name, t in tensors.items()]
        plan = self._plan
        if plan is None or seen != self._seen or (plan.writer, plan.writers) != (writer, writers):
            entries = describe(tensors)
            if plan is None or (plan.tensors, plan.writer, plan.writers) != (entries, writer, writers):
                plan = self._plan = make_plan(entries, writer=writer, writers=writers)
            self._seen = seen
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


class Image:
    """A plan's shard file in one piece of memory: where each piece of a tensor goes."""

    def __init__(self, plan: Plan, memory: torch.Tensor) -> None:
        self.plan, self.memory = plan, memory
        header = plan.layout.header
        memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._whole: list[tuple[int, torch.Tensor]] = []
        self._parts: list[tuple[Piece, torch.Tensor]] = []
        for piece, offset in zip(plan.layout.pieces, plan.layout.offsets, strict=True):
            tensor = plan.tensors[piece.tensor]
            room = memory[offset : offset + (piece.end - piece.begin) * tensor.itemsize]
            room = room.view(getattr(torch, tensor.dtype))
            if piece.begin == 0 and piece.end == tensor.elements:
                self._whole.append((piece.tensor, room.view(tensor.shape)))
            else:
                self._parts.append((piece, room))

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy; when this returns all bytes are there."""
        sources = [_plain(tensors[index]) for index, _ in self._whole]
        sources += [_plain(tensors[piece.tensor]).reshape(-1)[piece.begin : piece.end] for piece, _ in self._parts]
        rooms = [room for _, room in self._whole] + [room for _, room in self._parts]
        if rooms:
            torch._foreach_copy_(rooms, sources, non_blocking=True)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def fill(buffer: Buffer, memory: torch.Tensor, tensors: Sequence[torch.Tensor], plan: Plan) -> None:
    """Make `memory`, a part of `buffer`, the image of the plan's shard file."""
    if any(tensor.is_cuda for tensor in tensors):
        buffer.pin()
    image = buffer.image
    known = image is not None and image.plan is plan and image.memory.data_ptr() == memory.data_ptr()
    if image is None or not known:
        image = buffer.image = Image(plan, memory)
    with torch.no_grad():
        image.fill(tensors)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors of one dtype if they are the same elements."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device, tensor.is_conj()


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
            same_as = seen.setdefault((tensor.dtype, *_memory_of(tensor)), name)
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
