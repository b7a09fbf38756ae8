"""State -> a plan of which part of it this rank writes, and where in its shard file each piece lies.

Owns no memory: `image.py` copies as the plan says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from . import manifest as manifests
from .errors import UnsupportedStateError
from .manifest import Piece, TensorEntry
from .shards import Layout, layout, partition
from .tree import Nested, dtype_name, flatten


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
