"""The memory tier: the node's own copy of the newest step, in shared memory that outlives its workers.

Every rank writes alone, its share of the state (1 / local ranks) into one of its slots, without a word to the others.
That this is enough rests on one invariant:

    No rank begins to overwrite a slot before every rank has sealed a newer step.

A training loop gives it with `settle` before the ranks agree on a step and `keep` after it: who is past the agreement
on step s knows that all have sealed the step kept before s, and overwrites only what is older than that. So at any
instant, whoever is killed, the step before the newest is whole on every node, or the newest is: one step is repeated at
most. A third slot is what a commit to disk reads from meanwhile, so that the state is copied once for both.

The folder is the caller's: it makes it, says which processes of the node share it, and removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Container
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from .errors import CheckpointError
from .image import Copying, StagedShare, fill
from .plan import Planner, Snapshot
from .slot import FREE, Mark, Slot, slot_bytes
from .staging import GROWTH
from .tree import Nested

logger = logging.getLogger(__name__)
_FEWEST_SLOTS = 2
_MOST_SLOTS = 3
_USABLE_SHARE = 0.9  # of what is free: loaders and collectives need shared memory too
_INBOX_PREFIX = "received-"
_TEXT_ROOM_BYTES = 1 << 20
_INBOX_SECONDS = 2.0  # a gigabyte is freed in a tenth of one
_RETRY_SECONDS = 30.0  # memory that is full may be so for a moment only
_MARK_FIELDS = [field.name for field in dataclasses.fields(Mark)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A share that is copied, or being copied; it counts once it is sealed."""

    step: int
    bytes: int
    share: StagedShare
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A share that is whole. `seal_seconds` were spent beside training, on the rest of the copy and the checksum."""

    step: int
    bytes: int
    seal_seconds: float
    unix_time: float


class MemoryTier:
    """One rank's part of its node's memory.

    Args:
        folder: in /dev/shm, the same for all ranks of the node and for their successors; made when it is not there.
        local_rank, local_world_size: this rank among those of the folder.
        on_sealed: called on the tier's thread.
        on_failure: called with the reason when the tier cannot work; training goes on without it, until it can again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        local_rank: int = 0,
        local_world_size: int = 1,
        on_sealed: Callable[[Sealed], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 <= local_rank < local_world_size:
            raise CheckpointError(
                f"local_rank is {local_rank} and local_world_size {local_world_size}; it must be from 0 to one less"
            )
        self.folder = Path(folder).absolute()
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self._on_sealed, self._on_failure = on_sealed, on_failure
        self._planner = Planner()
        self._slots = [Slot(self.folder / f"rank-{local_rank}-slot-{number}") for number in range(_MOST_SLOTS)]
        self._count, self._room = _FEWEST_SLOTS, 0
        self._lent: Slot | None = None
        self._newest: tuple[int, Slot, Copying] | None = None  # step kept last, until it is settled
        self._tables: tuple[str, str] = ("", "")  # digest and JSON of the newest plan
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-memory", initializer=_give_way)
        self._beside: list[Future[None]] = []
        self.problem: str | None = None  # why nothing is kept
        self._retry_at = 0.0
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            self._give_up(f"{self.folder} cannot be made: {exc.strerror}")

    def expect(self, state_bytes: int, *, lend: bool) -> None:
        """The state will be about this large: have its slots ready by then. `lend`: commits to disk will read them."""
        if state_bytes and self.problem is None:
            share = state_bytes // self.local_world_size
            self._beside.append(self._thread.submit(self._warm, slot_bytes(_TEXT_ROOM_BYTES, share), lend))

    def restored(self, age: tuple[int, int], names: Collection[str]) -> None:
        """Training goes on from the (round, step) `age` as it lies in the slots of these names: they are not to be
        written to before there is something newer. All others may be; without any, all."""
        for slot in self._slots:
            slot.age = age if slot.path.name in names else FREE

    def keep(self, state: Nested, mark: Mark, *, reading: bool, steady: Container[int] = frozenset()) -> Kept | None:
        """Copy this rank's share; sealed in the background. None, with a warning once, when there is no room.

        `reading`: a commit to disk still reads the slot that was lent to it. `steady`: addresses of tensors that do not
        change before `settle`, and are copied in the background too.

        Raises:
            UnsupportedStateError: before anything is touched.
        """
        if self.problem is not None and time.monotonic() < self._retry_at:
            return None
        self.settle()
        snapshot, tensors = self._planner.plan(state, writer=self.local_rank, writers=self.local_world_size)
        text, size = self._text(snapshot, mark), snapshot.plan.layout.size_bytes
        if not reading:
            self._lent = None
        try:
            grown = self._make_room(slot_bytes(len(text), size))
            slot = self._next_slot()
            target = slot.begin(mark, text, size)
        except (OSError, MemoryError, CheckpointError) as exc:
            self._give_up(str(exc))
            return None
        if self.problem is not None:
            logger.info("checkpoints in memory are on again with step %d", mark.step)
            self.problem = None
        copying = fill(slot, target, tensors, snapshot.plan, steady)
        self._newest = (mark.step, slot, copying)
        self._beside.append(self._thread.submit(self._seal, slot, mark, copying))
        if grown:
            self._beside.append(self._thread.submit(self._warm, self._room, self._count == _MOST_SLOTS))
        share = StagedShare(snapshot=snapshot, image=slot.share, copying=copying)
        return Kept(step=mark.step, bytes=size, share=share, slot=slot)

    def lend(self, kept: Kept, *, writer: int, writers: int) -> StagedShare | None:
        """The newest share for a commit to read, if that writes the same one and another slot is there to go on with.

        It is not written to until a `keep` that is told that nobody reads any more.
        """
        if not self.is_share(writer, writers) or self._count < _MOST_SLOTS:
            return None
        self._lent = kept.slot
        return dataclasses.replace(kept.share, image=kept.share.image[:])

    def is_share(self, writer: int, writers: int) -> bool:
        """Whether this rank keeps the same part of the state as a commit of that many writers has from it."""
        return (writer, writers) == (self.local_rank, self.local_world_size)

    def settle(self) -> str | None:
        """Wait until what was kept is sealed. Called before the ranks agree on the step after it.

        Returns what was wrong: a tensor that was called steady has changed, and the step is not kept.
        """
        beside, self._beside = self._beside, []
        for future in beside:
            future.result()
        if self._newest is None:
            return None
        (step, slot, copying), self._newest = self._newest, None
        changed = copying.settle()
        if changed is None:
            return None
        slot.clear()
        return f"{changed} was changed while it was copied: step {step} is not kept in memory"

    def inbox(self, name: str) -> str:
        """A directory for what a peer sends."""
        return str(self.folder / f"{_INBOX_PREFIX}{name}")

    def clear_inbox(self) -> None:
        """A restore is over, and what came for it is loaded."""
        if self.local_rank == 0:
            for path in self.folder.glob(f"{_INBOX_PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Seal what was kept, and unmap. What lies in the folder stays."""
        self.settle()
        self._thread.shutdown()
        for slot in self._slots:
            slot.share = memoryview(b"")
            slot.free()

    def _next_slot(self) -> Slot:
        """The one with the oldest step, but never the newest step and none that a commit reads."""
        newest = max(self._slots, key=lambda slot: slot.age)
        open_slots = [
            s for s in self._slots[: self._count] if s is not self._lent and (s is not newest or s.age == FREE)
        ]
        return min(open_slots, key=lambda slot: slot.age)

    def _make_room(self, size_bytes: int) -> bool:
        """See that this size fits; True when it is more than was known before."""
        if size_bytes <= self._room:
            return False
        self._fit(int(size_bytes * GROWTH), self._count if self._room else _MOST_SLOTS)
        return True

    def _fit(self, size_bytes: int, wanted: int) -> None:
        """Decide on the number of slots of that size. Every rank of the node comes to the same end.

        Raises:
            CheckpointError: not even two fit.
        """
        status = os.statvfs(self.folder)
        usable = int(_USABLE_SHARE * (status.f_bavail * status.f_frsize + _bytes_below(self.folder)))
        for count in range(wanted, _FEWEST_SLOTS - 1, -1):
            if count * size_bytes * self.local_world_size <= usable:
                self._count, self._room = count, size_bytes
                return
        needed = _FEWEST_SLOTS * size_bytes * self.local_world_size
        raise CheckpointError(
            f"this state needs {needed / 1e6:.0f} MB of {self.folder.parent} ({_FEWEST_SLOTS} copies), and "
            f"{usable / 1e6:.0f} MB can be had"
        )

    def _await_inbox(self) -> None:
        """Until the node's first rank has removed what came for the restore: these slots may need its room.

        It does so after the restore, while its neighbours go on. What is not removed in time is counted as free all
        the same: the slots are had before anything is written to them.
        """
        deadline = time.monotonic() + _INBOX_SECONDS
        while time.monotonic() < deadline and any(self.folder.glob(f"{_INBOX_PREFIX}*")):
            time.sleep(0.01)

    def _warm(self, size_bytes: int, lend: bool) -> None:
        try:
            self._await_inbox()
            if size_bytes > self._room:
                self._fit(size_bytes, _MOST_SLOTS if lend else _FEWEST_SLOTS)
            for slot in self._slots[: self._count]:
                if slot is not self._lent:
                    slot.allocate(size_bytes)
        except (OSError, MemoryError, CheckpointError) as exc:
            self._give_up(str(exc))

    def _seal(self, slot: Slot, mark: Mark, copying: Copying) -> None:
        began = time.monotonic()
        copying.run()
        if not slot.seal(unless=lambda: copying.changed() is not None):
            return
        if self._on_sealed is not None:
            now = time.monotonic()
            sealed = Sealed(step=mark.step, bytes=len(slot.share), seal_seconds=now - began, unix_time=time.time())
            try:
                self._on_sealed(sealed)
            except Exception:  # the caller's function on our thread
                logger.exception("on_sealed failed for step %d", mark.step)

    def _give_up(self, reason: str) -> None:
        """No memory checkpoints of this rank for a while; its peers' shares alone are no state: theirs are in vain."""
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        self._room = 0  # what fits is to be found out anew
        known, self.problem = self.problem is not None, reason
        if known:
            return
        logger.warning(
            "checkpoints in memory are off: %s. Training goes on, and tries again now and then; where it is too small "
            "enlarge it (docker: --shm-size, else mount -o remount,size=...), or say --no-memory-checkpoints",
            reason,
        )
        if self._on_failure is not None:
            self._on_failure(reason)

    def _text(self, snapshot: Snapshot, mark: Mark) -> bytes:
        """The slot's text (see `slot.Text`); what stays the same is turned into JSON once."""
        plan = snapshot.plan
        fields = {
            "mark": {name: getattr(mark, name) for name in _MARK_FIELDS},
            "writer": plan.writer,
            "writers": plan.writers,
            "digest": plan.digest,
        }
        if plan.writer == 0:
            if self._tables[0] != plan.digest:
                self._tables = (plan.digest, json.dumps([(t.name, t.dtype, t.shape, t.same_as) for t in plan.tensors]))
            leaves = json.dumps(snapshot.leaves, allow_nan=False)
            words = f'{{"state": {snapshot.form.text}, "leaves": {leaves}, "tensors": {self._tables[1]}}}'
            return f"{json.dumps(fields)}\n{words}".encode()
        return json.dumps(fields).encode()


def _give_way() -> None:
    """This thread waits for its turn on a processor: who has just given it work would else be put aside for it."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux, or a container that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _bytes_below(folder: Path) -> int:
    """What everything there takes, in directories too. Others of the node add to it and remove from it meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(directory, name).lstat().st_blocks * 512
    return total


def node_of(folder: Path) -> str:
    """The same for all who see this folder, and for nobody else."""
    status = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return xxhash.xxh3_64_hexdigest(f"{boot}:{status.st_dev}:{status.st_ino}".encode())
