"""CheckpointManager: save, keep, wait, restore, close.

`save` copies this rank's share and returns; the background thread writes, commits and applies retention. `keep` copies
it into the node's memory alone. What is called steady is copied beside training, until `settle`. All methods are called
from one thread, by every rank in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable

import torch

from .background import Background, CommitResult, Policy
from .check import check_arguments
from .claim import Claim
from .commit import Job
from .enter import enter
from .errors import CheckpointError, CoordinationError, DisturbedError, UnsupportedStateError
from .exchange import Store, open_exchange
from .image import StagedShare
from .line import Line
from .memory import MemoryTier
from .peers import Surroundings
from .publish import sweep
from .restore import Request, Restore, Restored
from .slot import FREE, Mark
from .stager import Stager
from .storage import LocalStorage, Storage, open_storage
from .transfer import own_address
from .tree import Nested

logger = logging.getLogger(__name__)
_CLOSE_GRACE_SECONDS = 5.0  # beyond the deadline of the commit in flight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A save whose bytes are safe from the training loop; those called steady once `settle` has returned.

    The commit goes on in the background. `stall_seconds`: how long the call took.
    """

    step: int
    bytes: int
    stall_seconds: float


class CheckpointManager:
    """The checkpoints of one run in one directory. The constructor is collective, like `save` and `restore`.

    Args:
        directory: a path or an fsspec URL; shared by all ranks, or one per node. None: nothing is saved, memory alone
            is kept.
        store: needed when `world_size` > 1. It is cloned; keys of ours are under "checkpoints/".
        round: a number that grows whenever the ranks are started anew; None takes 1 + the highest in the directory.
        fence: seconds until this node may be considered lost by its peers; nothing is published without time left.
        keep_last: how many of the newest checkpoints retention keeps.
        keep_every: keep those whose step is a multiple of it as well.
        commit_timeout_seconds: how long a commit, and each wait for the other ranks, may take.
        storage: another implementation of the file operations.
        on_result: called after each commit, on the background thread of every rank.
        memory: this rank's part of the node's memory, for `keep`; closed with the manager.

    Raises:
        StaleRoundError: the directory holds a later round, or this one of another incarnation.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        run_id: str = "",
        incarnation: str = "",
        round: int | None = None,
        fence: Callable[[], float] | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        commit_timeout_seconds: float = 600.0,
        storage: Storage | None = None,
        on_result: Callable[[CommitResult], None] | None = None,
        memory: MemoryTier | None = None,
    ) -> None:
        check_arguments(rank, world_size, store, keep_last, keep_every, commit_timeout_seconds)
        self._memory, self._saves_to_disk = memory, directory is not None
        if directory is not None:
            default, path = open_storage(directory)
        elif memory is not None:  # its rounds are on record there, for as long as what they are about
            default, path = LocalStorage(), str(memory.folder)
        else:
            raise CheckpointError("directory is None and memory as well; give one of them, or both")
        self._storage = storage if storage is not None and directory is not None else default
        self._timeout, self._store = commit_timeout_seconds, store
        self._exchange = open_exchange(store, rank, world_size, self._deadline())
        line = Line(
            run_id=run_id,
            incarnation=incarnation,
            round=round or 0,
            base_step=0,
            rank=rank,
            world_size=world_size,
            directory=path,
            nonce="",
        )
        policy = Policy(
            fence=fence if fence is not None else lambda: math.inf,
            keep_last=keep_last,
            keep_every=keep_every,
            on_result=on_result,
        )
        folder = memory.folder if memory is not None and self._saves_to_disk else None
        self._claim = Claim(self._storage, path, folder)
        self._background = Background(self._storage, self._exchange, policy, self._claim)
        try:
            self._line, self._past = enter(
                self._storage, self._exchange, line, self._deadline(), claim=self._claim, has_memory=memory is not None
            )
            self._find_groups()
        except BaseException:
            self._exchange.close()
            raise
        self._stager = Stager(memory)
        self._saves = self._restores = 0
        self._is_copying_save = self._closed = False

    @property
    def round(self) -> int:
        """The round that this manager's commits belong to."""
        return self._line.round

    @property
    def busy(self) -> bool:
        """A commit of ours is in flight; a save would wait for it first."""
        return self._background.busy

    def restore(
        self, like: Nested | None = None, *, fingerprint: str | None = None, allow_fresh_start: bool = False
    ) -> Restored | None:
        """The newest good state that some rank has whole; None when there is no checkpoint at all. Collective.

        Ranks without it (a new node, one that was away, a damaged copy) are sent it by those that have it, and keep a
        copy. What cannot be used is passed over for the next older state of the line, with a warning and in `skipped`.

        Args:
            like: under each of its top-level keys the checkpoint must have exactly its tensors.
            fingerprint: of the data at hand; must be the checkpoint's, if that has one.
            allow_fresh_start: None also when there are checkpoints and none is good.

        Raises:
            CheckpointMismatchError, FingerprintError, NoUsableCheckpointError: on every rank alike.
            CoordinationError: a rank or the store did not answer.
        """
        self.wait()
        if self._is_leader:
            self._sweep()
        request = Request(like=like, fingerprint=fingerprint, allow_fresh_start=allow_fresh_start)
        scope = f"restore/{self._restores}"
        self._restores += 1
        restore = Restore(
            self._line, self._storage, self._exchange, request, self._around(), scope=scope, deadline=self._deadline()
        )
        restored = restore.run(self._record_round)
        base_step = restored.step if restored is not None else 0
        if self._is_leader and self._line.rank != 0:
            self._record_round(base_step)
        writer, writers = self._as_writer()
        self._stager.expect(
            restored.state if restored is not None else like,
            writer=writer,
            writers=writers,
            saves_to_disk=self._saves_to_disk,
        )
        self._line = dataclasses.replace(self._line, base_step=base_step)
        if self._memory is not None:
            if self._memory.local_rank == 0:
                self._claim.note(self._line)
            own = restored is not None and restored.path == str(self._memory.folder)
            age = (restored.round, restored.step) if restored is not None else FREE
            self._memory.restored(age, restored.files if restored is not None and own else ())
        source = "" if restored is None else f" in {'memory' if restored.tier == 'memory' else restored.path}"
        logger.info("round %d rank %d starts from step %d%s", self._line.round, self._line.rank, base_step, source)
        return restored

    def keep(
        self,
        step: int,
        state: Nested,
        *,
        samples: int = 0,
        fingerprint: str = "",
        steady: Iterable[torch.Tensor] = (),
    ) -> Staged | None:
        """Copy this rank's share of `state` into the node's memory; None when it is off or has no room (see the log).

        Speaks with nobody. The ranks call it after the same steps, once they have agreed on the step after a `settle`:
        see `memory.py` for what that gives.

        Args:
            steady: tensors of the state that nothing changes before `settle` (parameters and the optimizer's state, in
                a forward and a backward). They are copied beside training, all others before this returns.

        Raises:
            UnsupportedStateError: a leaf cannot be stored.
            CheckpointError: `restore` was not called: what an earlier round has kept would be written over.
        """
        self._check_save(step)
        if self._memory is not None and not self._restores:
            raise CheckpointError("keep() before restore() would write over what memory holds; call restore() first")
        started = time.monotonic()
        self._complain(self._settle())
        mark = self._mark(step, samples, fingerprint)
        kept = self._stager.keep(state, mark, reading=self.busy, steady=_addresses(steady))
        if kept is None:
            return None
        return Staged(step=step, bytes=kept.bytes, stall_seconds=time.monotonic() - started)

    def settle(self) -> None:
        """Wait until what `keep` and `save` were given is copied, and sealed where memory has it.

        Called before the ranks agree on a step, and before anything changes that was called steady.

        Raises:
            DisturbedError: it was changed before; the step is not kept, and its commit fails.
        """
        if (problem := self._settle()) is not None:
            raise DisturbedError(problem)

    def save(
        self,
        step: int,
        state: Nested,
        *,
        samples: int = 0,
        fingerprint: str = "",
        steady: Iterable[torch.Tensor] = (),
    ) -> Staged:
        """Copy this rank's share of `state` and commit it in the background. Collective. `steady`: see `keep`.

        Waits for the commit before it. Only the tensors are shared out; all else is stored as rank 0 has it.

        Raises:
            UnsupportedStateError: a leaf cannot be stored; the other ranks' commit fails with this reason.
            CheckpointError: the directory held checkpoints before, and `restore` was not called. On every rank.
        """
        self._check_save(step)
        if not self._saves_to_disk:
            raise CheckpointError("this CheckpointManager has no directory to save to; use keep(), or give it one")
        if self._past is not None and not self._restores:
            raise CheckpointError(
                f"{self._line.directory} holds {self._past} and restore() was not called: training that starts anew "
                "would put aside what is there. Call restore() first, or save to another directory"
            )
        self._complain(self._settle())
        self._background.wait(self._timeout + _CLOSE_GRACE_SECONDS)
        started = time.monotonic()
        share, refusal = self._stage(state, self._mark(step, samples, fingerprint), _addresses(steady))
        stall_seconds = time.monotonic() - started
        job = Job(
            number=self._saves,
            step=step,
            samples=samples,
            fingerprint=fingerprint,
            share=share,
            refusal=str(refusal),
            groups=self._background.groups(self._line.world_size),
            started=started,
            deadline=started + self._timeout,
        )
        self._saves += 1
        size = len(share.image) if share is not None else 0
        self._is_copying_save = True
        self._background.start(job, self._line, stall_seconds)
        if isinstance(refusal, UnsupportedStateError):
            raise refusal
        return Staged(step=step, bytes=size, stall_seconds=stall_seconds)

    def wait(self, timeout_seconds: float | None = None) -> CommitResult | None:
        """The result of the newest save; None when nothing was saved. Its state is `unknown` when the time is over."""
        limit = self._timeout + _CLOSE_GRACE_SECONDS
        return self._background.wait(limit if timeout_seconds is None else timeout_seconds)

    def close(self) -> None:
        """Wait for the commit in flight (bounded), end the threads and free the staging buffer."""
        self._closed = True
        self._complain(self._stager.settle())
        if not self._background.close(self._timeout + _CLOSE_GRACE_SECONDS):
            logger.error("a commit is stuck in the file system or the store; its thread and buffer are left behind")
            return
        self._exchange.close()
        self._stager.close()

    def _check_save(self, step: int) -> None:
        if self._closed:
            raise CheckpointError("this CheckpointManager is closed; make a new one to save")
        if step < 0:
            raise CheckpointError(f"step is {step}; it must not be negative")

    def _settle(self) -> str | None:
        """What was wrong with the newest `keep` or `save`. The wait is part of how long a save has held up training."""
        began = time.monotonic()
        problem = self._stager.settle()
        if self._is_copying_save:
            self._background.waited(time.monotonic() - began)
        self._is_copying_save = False
        return problem

    def _complain(self, problem: str | None) -> None:
        if problem is not None:
            logger.error("rank %d: %s", self._line.rank, problem)

    def _mark(self, step: int, samples: int, fingerprint: str) -> Mark:
        line = self._line
        return Mark(
            run_id=line.run_id,
            incarnation=line.incarnation,
            round=line.round,
            base_step=line.base_step,
            step=step,
            samples=samples,
            fingerprint=fingerprint,
            world_size=line.world_size,
            nonce=line.nonce,
            unix_time=time.time(),
        )

    def _stage(self, state: Nested, mark: Mark, steady: frozenset[int]) -> tuple[StagedShare | None, Exception | None]:
        """This rank's share, or why there is none: a rank that cannot stage takes part in the commit all the same, to
        say so."""
        writer, writers = self._as_writer()
        try:
            if self.busy:
                raise CheckpointError("the commit before it is stuck beyond its deadline")
            may_keep = mark if self._restores else None
            return self._stager.take(state, may_keep, writer=writer, writers=writers, steady=steady), None
        except (CheckpointError, OSError, MemoryError) as exc:
            logger.error("rank %d cannot stage a checkpoint: %s", self._line.rank, exc)
            return None, exc

    def _as_writer(self) -> tuple[int, int]:
        """(which, of how many) of those that write a copy of the state together."""
        members = self._background.groups(self._line.world_size).members(self._line.rank)
        return members.index(self._line.rank), len(members)

    def _find_groups(self) -> None:
        try:
            self._background.find_groups(self._line, attempt=0, deadline=self._deadline())
        except CoordinationError:
            raise
        except (CheckpointError, OSError) as exc:
            logger.error("saves will fail until this is mended: %s", exc)

    def _around(self) -> Surroundings:
        """Who shares a directory with whom. Where that is not known, each rank stands alone and writes nothing."""
        world_size, known = self._line.world_size, self._background.groups_known
        apart = self._storage.renames and not known  # an object store is shared by nature
        homes = tuple(range(world_size)) if apart else self._background.groups(world_size).leaders
        return Surroundings(
            homes=homes,
            writable=known,
            address=functools.partial(own_address, self._store),
            memory=self._memory,
            claim=self._claim,
        )

    def _sweep(self) -> None:
        line = self._line
        try:
            sweep(self._storage, line.directory, line.round)
        except OSError as exc:
            logger.warning("what dead commits left in %s stays: %s", line.directory, exc)

    @property
    def _is_leader(self) -> bool:
        return self._background.groups(self._line.world_size).leaders[self._line.rank] == self._line.rank

    def _record_round(self, base_step: int) -> None:
        """A leader's, once a restore is decided: what this round will not contain is void from now on."""
        try:
            self._claim.stake(dataclasses.replace(self._line, base_step=base_step))
        except (OSError, CheckpointError) as exc:  # tried again before the first commit, which fails when this does
            logger.error("round %d could not be recorded in %s: %s", self._line.round, self._line.directory, exc)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout


def _addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Where they lie: a state holds other objects of the same memory (`state_dict` detaches)."""
    return frozenset(tensor.data_ptr() for tensor in tensors)
