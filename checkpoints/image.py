"""A shard file's image in memory, and the copy of a state's tensors into it: at once, or beside training.

A tensor that the caller calls steady does not change before `settle`. Its copy may take its time: on another thread,
and from a device on a stream of its own, while the next forward runs. Whether that was kept to is looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch

from .plan import Plan, Snapshot
from .staging import Buffer


class _Move(NamedTuple):
    """One tensor, or the piece of it that is this rank's, to its room in the image."""

    name: str
    live: torch.Tensor
    source: torch.Tensor
    room: torch.Tensor


class Image:
    """Where in the memory each piece of the plan's shard file goes."""

    def __init__(self, plan: Plan, memory: torch.Tensor) -> None:
        self.plan, self.memory = plan, memory
        header = plan.layout.header
        memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._rooms: list[tuple[str, int, slice | None, torch.Tensor]] = []
        for piece, offset in zip(plan.layout.pieces, plan.layout.offsets, strict=True):
            tensor = plan.tensors[piece.tensor]
            room = memory[offset : offset + (piece.end - piece.begin) * tensor.itemsize]
            room = room.view(getattr(torch, tensor.dtype))
            if piece.begin == 0 and piece.end == tensor.elements:
                self._rooms.append((tensor.name, piece.tensor, None, room.view(tensor.shape)))
            else:
                self._rooms.append((tensor.name, piece.tensor, slice(piece.begin, piece.end), room))

    def moves(self, tensors: Sequence[torch.Tensor]) -> list[_Move]:
        """What is to be copied from where to where; `tensors` are in the order of the plan's table."""
        moves = []
        for name, index, part, room in self._rooms:
            live = tensors[index]
            source = live if not live.is_conj() and not live.is_neg() else live.resolve_conj().resolve_neg()
            moves.append(_Move(name, live, source if part is None else source.reshape(-1)[part], room))
        return moves


class Copying:
    """The part of a copy that goes on beside training; nothing, when all was copied at once.

    `run` may be called on several threads: one of them copies, the others wait for it.
    """

    def __init__(self, moves: Sequence[_Move] = ()) -> None:
        self._moves = list(moves)
        self._watched = [(name, live, live._version) for name, live, _, _ in moves]
        self._ready = {d: torch.cuda.current_stream(d).record_event() for d in _devices(moves)}
        self._lock = threading.Lock()
        self._done = self._settled = False
        self._changed: str | None = None

    def run(self) -> None:
        """Copy; when this returns all bytes are there."""
        with self._lock:
            if self._done:  # and not only begun: it may have raised on another thread
                return
            _copy([move for move in self._moves if not move.source.is_cuda])
            for device, ready in self._ready.items():
                stream = _side_stream(device)
                stream.wait_event(ready)
                with torch.cuda.stream(stream):
                    _copy([move for move in self._moves if move.source.device == device])
                stream.synchronize()
            self._done = True
            self._moves.clear()

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
                self._watched.clear()
            return self._changed

    def _first_changed(self) -> str | None:
        return next((name for name, live, version in self._watched if live._version != version), None)


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
    if any(tensor.is_cuda for tensor in tensors):
        buffer.pin()
    image = buffer.image
    known = image is not None and image.plan is plan and image.memory.data_ptr() == memory.data_ptr()
    if image is None or not known:
        image = buffer.image = Image(plan, memory)
    now: list[_Move] = []
    later: list[_Move] = []
    for move in image.moves(tensors):
        live = move.live
        (later if live.data_ptr() in steady and not live.is_inference() else now).append(move)
    _copy(now)
    for device in _devices(now):
        torch.cuda.current_stream(device).synchronize()
    return Copying(later)


def _copy(moves: Sequence[_Move]) -> None:
    """On the current stream, where a device is part of it."""
    if moves:
        with torch.no_grad():
            torch._foreach_copy_([move.room for move in moves], [move.source for move in moves], non_blocking=True)


def _devices(moves: Sequence[_Move]) -> set[torch.device]:
    return {move.source.device for move in moves if move.source.is_cuda}


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
