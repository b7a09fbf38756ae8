"""Takes a rank's share of a state out of the training loop: into the node's memory, into a buffer of its own, or both.

A commit reads the copy in memory where that is the same share; on a file system that several nodes share it is not, and
there are two copies.
"""

from __future__ import annotations

from collections.abc import Container

from .image import Copying, StagedShare, fill
from .memory import Kept, MemoryTier
from .plan import Planner, stored_bytes
from .shards import SMALLEST_CUT_BYTES
from .slot import Mark
from .staging import StagingBuffer
from .tree import Nested

_HEADER_ROOM_BYTES = 1 << 20


class Stager:
    """`steady` are the addresses of tensors that do not change before `settle`: they are copied beside training."""

    def __init__(self, memory: MemoryTier | None) -> None:
        self.buffer = StagingBuffer()
        self._memory, self._planner = memory, Planner()
        self._copying = Copying()  # of the newest share in our buffer

    def keep(self, state: Nested, mark: Mark, *, reading: bool, steady: Container[int]) -> Kept | None:
        """Into memory alone; None when there is none. `reading`: a commit may still read what it was lent.

        Raises:
            UnsupportedStateError: before anything is copied. So does `take`.
        """
        return self._memory.keep(state, mark, reading=reading, steady=steady) if self._memory is not None else None

    def take(
        self, state: Nested, mark: Mark | None, *, writer: int, writers: int, steady: Container[int]
    ) -> StagedShare:
        """The share of writer number `writer`, for a commit to read; without a mark it is not put into memory."""
        if mark is not None and self._memory is not None:
            kept = self.keep(state, mark, reading=False, steady=steady)
            lent = self._memory.lend(kept, writer=writer, writers=writers) if kept is not None else None
            if lent is not None:
                return lent
        snapshot, tensors = self._planner.plan(state, writer=writer, writers=writers)
        size = snapshot.plan.layout.size_bytes
        self._copying = fill(self.buffer, self.buffer.reserve(size), tensors, snapshot.plan, steady)
        return StagedShare(snapshot=snapshot, image=self.buffer.view(size), copying=self._copying)

    def settle(self) -> str | None:
        """Wait until all that was taken is copied, and sealed in memory; what was wrong with it."""
        kept = self._memory.settle() if self._memory is not None else None
        changed, self._copying = self._copying.settle(), Copying()
        return kept if changed is None else f"{changed} was changed while it was copied: its checkpoint fails"

    def expect(self, state: Nested | None, *, writer: int, writers: int, saves_to_disk: bool) -> None:
        """A state of about this size is going to be taken: have the memory warm by then, while the caller goes on."""
        size = stored_bytes(state)
        lend = saves_to_disk and self._memory is not None and self._memory.is_share(writer, writers)
        if self._memory is not None:
            self._memory.expect(size, lend=lend)
        if saves_to_disk and not lend and size:
            self.buffer.warm(size // writers + SMALLEST_CUT_BYTES + _HEADER_ROOM_BYTES)

    def close(self) -> None:
        """Free the buffer, and let go of the memory. Nothing reads either any more."""
        self.buffer.close()
        if self._memory is not None:
            self._memory.close()
