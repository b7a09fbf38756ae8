"""A shard file's image in memory, and the copy of a state's tensors into it: at once, or beside training.

A tensor that the caller calls steady does not change before `settle`. Its copy may take its time: on another thread,
and from a device on a stream of its own, while the next forward runs. Whether that was kept to is looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .plan import Plan, Snapshot
from .staging import Buffer

_version_of = operator.attrgetter("_version")
_is_cuda = operator.attrgetter("is_cuda")


class _Moves(NamedTuple):
    """Tensors, or the pieces of them that are this rank's, to their rooms in the image: a table by its columns."""

    names: list[str]
    live: list[torch.Tensor]
    sources: list[torch.Tensor]
    rooms: list[torch.Tensor]

    def only(self, chosen: Iterable[bool]) -> _Moves:
        """The rows that are chosen."""
        which = list(chosen)
        if all(which):
            return self
        return _Moves(
            [*itertools.compress(self.names, which)],
            *([*itertools.compress(column, which)] for column in (self.live, self.sources, self.rooms)),
        )


_NO_MOVES = _Moves([], [], [], [])


class Image:
    """Where in the memory each piece of the plan's shard file goes."""

    def __init__(self, plan: Plan, memory: torch.Tensor) -> None:
        self.plan, self.memory = plan, memory
        header = plan.layout.header
        memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._indices = [piece.tensor for piece in plan.layout.pieces]
        self._names = [plan.tensors[index].name for index in self._indices]
        self._rooms: list[torch.Tensor] = []
        self._parts: list[tuple[int, slice]] = []  # rows that are no whole tensor
        for row, (piece, offset) in enumerate(zip(plan.layout.pieces, plan.layout.offsets, strict=True)):
            tensor = plan.tensors[piece.tensor]
            room = memory[offset : offset + (piece.end - piece.begin) * tensor.itemsize]
            room = room.view(getattr(torch, tensor.dtype))
            if piece.begin == 0 and piece.end == tensor.elements:
                room = room.view(tensor.shape)
            else:
                self._parts.append((row, slice(piece.begin, piece.end)))
            self._rooms.append(room)

    def moves(self, tensors: Sequence[torch.Tensor]) -> _Moves:
        """What is to be copied from where to where; `tensors` are in the order of the plan's table."""
        live = [tensors[index] for index in self._indices]
        sources = live
        if any(map(torch.Tensor.is_conj, live)) or any(map(torch.Tensor.is_neg, live)):
            sources = [tensor.resolve_conj().resolve_neg() for tensor in live]
        if self._parts:
            sources = list(sources)
            for row, part in self._parts:
                sources[row] = sources[row].reshape(-1)[part]
        return _Moves(self._names, live, sources, self._rooms)


class Copying:
    """The part of a copy that goes on beside training; nothing, when all was copied at once.

    `run` may be called on several threads: one of them copies, the others wait for it.
    """

    def __init__(self, moves: _Moves = _NO_MOVES) -> None:
        self._moves = moves
        self._watched = moves
        self._versions = list(map(_version_of, moves.live))
        self._ready = {d: torch.cuda.current_stream(d).record_event() for d in _devices(moves)}
        self._lock = threading.Lock()
        self._done = self._settled = False
        self._changed: str | None = None

    @property
    def pending(self) -> int:
        """How many tensors are still to be copied."""
        return len(self._moves.sources)

    def run(self) -> None:
        """Copy; when this returns all bytes are there."""
        with self._lock:
            if self._done:  # and not only begun: it may have raised on another thread
                return
            moves = self._moves
            _copy(moves.only(not source.is_cuda for source in moves.sources))
            for device, ready in self._ready.items():
                stream = _side_stream(device)
                stream.wait_event(ready)
                with torch.cuda.stream(stream):
                    _copy(moves.only(source.device == device for source in moves.sources))
                stream.synchronize()
            self._done, self._moves = True, _NO_MOVES

    def changed(self) -> str | None:
        """The name of a tensor that was changed before `settle`: the copy may be of two states. After `run`.

        Asked for some time after the copy, since a change is to be seen when it is over and not when it begins. What
        is written past torch's own count of changes, through `.data` or a kernel of one's own, is not seen.
        """
        with self._lock:
            return self._changed if self._settled else self._first_changed()

    def settle(self) -> str | None:
        """Wait for the copy. From now on all may change; what was changed before is named."""
        self.run()
        with self._lock:
            if not self._settled:
                self._changed, self._settled = self._first_changed(), True
                self._watched, self._versions = _NO_MOVES, []
            return self._changed

    def _first_changed(self) -> str | None:
        watched = self._watched
        if list(map(_version_of, watched.live)) == self._versions:
            return None
        rows = zip(watched.names, watched.live, self._versions, strict=True)
        return next((name for name, live, version in rows if live._version != version), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedShare:
    """This rank's share of a state on its way out of the training loop: `image` is all there once `copying` has run."""

    snapshot: Snapshot
    image: memoryview
    copying: Copying


def fill(
    buffer: Buffer,
    memory: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    plan: Plan,
    steady: Container[int] = frozenset(),
) -> Copying:
    """Make `memory`, a part of `buffer`, the image of the plan's shard file.

    What does not lie at one of the addresses in `steady` is there when this returns; the rest is what is returned.
    """
    if any(map(_is_cuda, tensors)):
        buffer.pin()
    image = buffer.image
    known = image is not None and image.plan is plan and image.memory.data_ptr() == memory.data_ptr()
    if image is None or not known:
        image = buffer.image = Image(plan, memory)
    moves = image.moves(tensors)
    is_steady = [place in steady for place in map(torch.Tensor.data_ptr, moves.live)]
    if any(map(torch.Tensor.is_inference, moves.live)):  # whose changes are not counted
        is_steady = [is_so and not live.is_inference() for is_so, live in zip(is_steady, moves.live, strict=True)]
    now = moves.only(not is_so for is_so in is_steady)
    _copy(now)
    for device in _devices(now):
        torch.cuda.current_stream(device).synchronize()
    return Copying(moves.only(is_steady))


def _copy(moves: _Moves) -> None:
    """On the current stream, where a device is part of it."""
    if moves.sources:
        with torch.no_grad():
            torch._foreach_copy_(moves.rooms, moves.sources, non_blocking=True)


def _devices(moves: _Moves) -> set[torch.device]:
    return {source.device for source in moves.sources if source.is_cuda}


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
