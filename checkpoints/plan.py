"""State -> a plan of which part of it this rank writes, and where in its shard file each piece lies.

Owns no memory: `image.py` copies as the plan says.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import manifest as manifests
from .errors import UnsupportedStateError
from .form import Form, split
from .manifest import Piece, TensorEntry
from .shards import Layout, layout, partition
from .tree import Json, Nested, dtype_name

_looks = operator.attrgetter("dtype", "layout", "shape", "device")


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
    """A plan, and what is not tensors: the form, and its other leaves."""

    plan: Plan
    form: Form
    leaves: Sequence[Json]

    @property
    def skeleton(self) -> Json:
        """The state with each tensor replaced by its name, made anew each time."""
        return self.form.skeleton(self.leaves)


class Planner:
    """Makes plans, and keeps one for as long as the state's form stays the same.

    A training loop saves the same tensors again and again: that they are the same is told from little.
    """

    def __init__(self) -> None:
        self._form: Form | None = None
        self._plan: Plan | None = None
        self._seen: list[Any] = []  # of the tensors: dtype, shape ...
        self._places: list[tuple[Any, ...]] = []

    def plan(self, state: Nested, *, writer: int, writers: int) -> tuple[Snapshot, list[torch.Tensor]]:
        """How the state is laid out, and its tensors in the order of the plan's table.

        Raises:
            UnsupportedStateError
        """
        content = self._form.read(state) if self._form is not None else None
        if content is None or not self._look_alike(content.tensors):
            self._form, content = split(state)
            self._seen, self._places = list(map(_looks, content.tensors)), []
        form, tensors, plan = self._form, content.tensors, self._plan
        assert form is not None
        places = _places_of(tensors)
        if plan is None or places != self._places or (plan.writer, plan.writers) != (writer, writers):
            entries = describe(form.names, tensors)
            if plan is None or (plan.tensors, plan.writer, plan.writers) != (entries, writer, writers):
                plan = self._plan = make_plan(entries, writer=writer, writers=writers)
            self._places = places
        return Snapshot(plan=plan, form=form, leaves=content.leaves), tensors

    def _look_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they are as those seen last, of which it is known that they can be stored."""
        try:
            return list(map(_looks, tensors)) == self._seen
        except RuntimeError:  # an odd one, without a shape
            return False


def _places_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Equal for two tensors that look the same if they are the same elements."""
    facts = (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg)
    return list(zip(*(map(fact, tensors) for fact in facts), strict=True))


def stored_bytes(state: Nested) -> int:
    """About how many bytes a state will take; 0 when it cannot be stored, which its save will say."""
    try:
        form, content = split(state)
        return sum(entry.stored_bytes for entry in describe(form.names, content.tensors))
    except UnsupportedStateError:
        return 0


def describe(names: Iterable[str], tensors: Sequence[torch.Tensor]) -> tuple[TensorEntry, ...]:
    """The table of tensors; one that is the same memory as an earlier one (tied weights) is stored once."""
    seen: dict[tuple[Any, ...], str] = {}
    entries = []
    for name, tensor, place in zip(names, tensors, _places_of(tensors), strict=True):
        same_as = None
        if tensor.numel():
            same_as = seen.setdefault((_looks(tensor), place), name)
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
