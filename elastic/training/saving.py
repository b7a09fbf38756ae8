"""When to save and to keep, and the way to the checkpoints package: the only place of a worker that imports it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastic.errors import DatasetChangedError, JobFailedError, NoUsableCheckpointError
from elastic.own_checkpoints import own_checkpoints
from elastic.progress import Phase
from elastic.training.environment import Every
from elastic.training.memory_policy import MemoryPolicy
from elastic.training.session import Session
from elastic.training.steadiness import Steadiness
from elastic.training.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from checkpoints import CheckpointManager, MemoryTier, Restored
    from checkpoints.memory import Sealed
    from checkpoints.storage import Storage

logger = logging.getLogger(__name__)
_SECONDS_FOR_COMMIT_AFTER_FAILURE = 5.0  # its thread is a daemon and ends with the process


class SavePolicy:
    """Whether a periodic save is due. Ranks decide alike: steps are known to all, time is rank 0's, told by `agree`.

    `unsaved_seconds`: since the last one of the rounds before, which may each have been shorter than the interval.
    """

    def __init__(
        self,
        every: Every | None,
        *,
        is_clock: bool,
        unsaved_seconds: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._is_clock, self._now = every, is_clock, now
        self._saved_at = now() - unsaved_seconds
        self._wanted = False

    def clock_says_save(self) -> bool:
        """This rank's contribution to the agreement."""
        if not self._is_clock or self._every is None or self._every.seconds is None:
            return False
        return self._now() - self._saved_at >= self._every.seconds

    def decide(self, step: int, *, asked: bool, busy: bool) -> bool:
        """Called once after each step with what all agreed on. A save that finds a rank busy waits for its turn."""
        by_steps = self._every is not None and self._every.steps is not None and step % self._every.steps == 0
        self._wanted = self._wanted or asked or by_steps
        return self._wanted and not busy

    def ask(self) -> None:
        """Save after the next step."""
        self._wanted = True

    def saved(self) -> None:
        """A save has begun."""
        self._wanted, self._saved_at = False, self._now()


class Saver:
    """Binds the Trainer's state to a CheckpointManager. Without directory and memory everything here does nothing."""

    def __init__(
        self,
        config: TrainerConfig,
        session: Session,
        *,
        storage: Storage | None = None,
        sharded: bool = False,
        on_host: bool = True,
        steady: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """`sharded`: no rank has the optimizer's state whole. `on_host`: training needs the processor itself.

        `steady`: what of the state stays as it is until `settle`, which is called before an update.
        """
        self._config, self._session, self._storage = config, session, storage
        self._manager: CheckpointManager | None = None
        self._tier: MemoryTier | None = None
        self._saved_step = self._kept_step = -1
        self._memory_policy = MemoryPolicy(session.memory_every or config.memory_every)
        self._memory_due = False
        self._on_host, self._seal_seconds = on_host, 0.0
        self._steadiness = Steadiness(steady, overlap=config.overlap_copies)
        self._unsettled = False
        self._memory_dir = session.memory_dir
        if sharded and self._memory_dir:
            self._memory_dir = None
            if session.rank == 0:
                logger.warning(
                    "checkpoints in memory are off: the optimizer's state is shared out over the ranks "
                    "(ZeroRedundancyOptimizer), so no node has it whole"
                )
        every = session.checkpoint_every or config.every
        self.policy = SavePolicy(every, is_clock=session.rank == 0, unsaved_seconds=session.unsaved_seconds)
        self._directory = session.checkpoint_dir or config.checkpoint_dir
        if session.checkpoint_dir and config.checkpoint_dir and session.checkpoint_dir != config.checkpoint_dir:
            logger.warning(
                "checkpoints go to %s, as --checkpoint-dir says, not to the program's %s",
                session.checkpoint_dir,
                config.checkpoint_dir,
            )
        if self._directory is None and session.rank == 0:
            kept = "; memory holds its newest state until the agent ends" if self._memory_dir else ""
            logger.warning("no checkpoint directory is set: this run cannot be resumed%s", kept)

    def open(self) -> None:
        """Connect to the round's store and the directory. Collective; the process group exists by now."""
        session, config = self._session, self._config
        if self._directory is None and not self._all_have_memory():
            return
        self._tier = self._memory_tier()
        self._manager = own_checkpoints("manager").CheckpointManager(
            self._directory,
            rank=session.rank,
            world_size=session.world_size,
            store=session.store(),
            run_id=session.run_id,
            incarnation=session.incarnation,
            round=session.round if session.under_agent and not self._is_unknown_to_agent else None,
            keep_last=config.checkpoint_keep_last,
            keep_every=config.checkpoint_keep_every,
            commit_timeout_seconds=config.commit_timeout_seconds,
            storage=self._storage,
            on_result=self._session.committed,
            memory=self._tier,
        )

    @property
    def _is_unknown_to_agent(self) -> bool:
        """A directory that the program alone names: an agent counts its rounds from 1, whatever is there."""
        return self._directory is not None and self._session.checkpoint_dir is None

    def restore(self, *, like: Mapping[str, Any], fingerprint: str) -> Restored | None:
        """The newest good state, or None at a fresh start. Collective; nothing live is touched.

        Raises:
            NoUsableCheckpointError, DatasetChangedError, JobFailedError: a retry would find the same.
        """
        if self._manager is None:
            return None
        errors = own_checkpoints("errors")
        with self._session.phase(Phase.RESTORE):
            try:
                restored = self._manager.restore(
                    like,
                    fingerprint=fingerprint,
                    allow_fresh_start=self._config.allow_fresh_start or self._session.allow_fresh_start,
                )
            except errors.NoUsableCheckpointError as error:
                raise NoUsableCheckpointError(str(error)) from error
            except errors.FingerprintError as error:
                raise DatasetChangedError(str(error)) from error
            except errors.CheckpointMismatchError as error:
                raise JobFailedError(str(error)) from error
        self._session.restored(restored)
        if restored is not None and restored.tier == "memory":
            self._kept_step = restored.step
            if self._tier is not None and self._tier.problem is not None:  # said before that, or beside it
                self._session.note(memory_step=-1)
        elif restored is not None:
            self._saved_step = restored.step
        return restored

    def _all_have_memory(self) -> bool:
        """Memory alone serves only if all ranks have it: what they do with it is collective."""
        if self._session.world_size == 1:
            return self._memory_dir is not None
        agreed = self._session.agree(sums=(float(self._memory_dir is not None),))
        return agreed.sums[0] == self._session.world_size

    def _memory_tier(self) -> MemoryTier | None:
        if self._memory_dir is None:
            return None
        tier: MemoryTier = own_checkpoints("memory").MemoryTier(
            self._memory_dir,
            local_rank=self._session.memory_rank,
            local_world_size=self._session.local_world_size,
            on_sealed=self._on_sealed,
            on_failure=self._session.unsealed,
        )
        return tier

    @property
    def _hang_seconds(self) -> float:
        """No save takes longer than this: a wait for a commit has its own end, and another may come before it."""
        return 2 * self._config.commit_timeout_seconds

    @property
    def busy(self) -> bool:
        """This rank's commit is still under way."""
        return self._manager is not None and self._manager.busy

    def save(self, step: int, state: Callable[[], dict[str, Any]], *, samples: int, fingerprint: str) -> None:
        """Stage `state()` as `step` and commit it in the background; nothing to do when `step` is saved already."""
        self.policy.saved()
        if self._directory is None:
            self.keep(step, state, samples=samples, fingerprint=fingerprint)
        if self._manager is None or self._directory is None or step == self._saved_step:
            return
        with self._session.phase(Phase.CHECKPOINT, limit_seconds=self._hang_seconds):
            self._unsettled = True
            self._manager.save(
                step, state(), samples=samples, fingerprint=fingerprint, steady=self._steadiness.at_copy()
            )
        self._saved_step = self._kept_step = step
        self._memory_policy.taken()

    def contribution(self) -> tuple[float, ...]:
        """This rank's `memory_policy.SLOTS` sums of the step's exchange; what was kept before is whole by then."""
        self.settle()
        return self._memory_policy.contribution()

    def settle(self, *, after_forward: bool = True) -> None:
        """Wait until what was kept or saved is copied. From now on the state may change.

        `after_forward`: a step's forwards have run since; what they do to the state can be told.
        """
        if self._manager is None or not self._unsettled:
            return
        self._unsettled = False
        queued = None if self._on_host else torch.cuda.current_stream().record_event()
        began = time.perf_counter()
        try:
            with self._session.phase(Phase.CHECKPOINT):
                self._manager.settle()
        except own_checkpoints("errors").DisturbedError as error:
            logger.error(
                "run=%s round=%s rank=%s %s", self._session.run_id, self._session.round, self._session.rank, error
            )
            self._steadiness.broken()
        self._steadiness.at_settle(after_forward=after_forward)
        if queued is not None and queued.query():  # the device has had nothing to do meanwhile
            self._memory_policy.waited(time.perf_counter() - began)

    def heard(self, sums: Sequence[float], step_seconds: float) -> None:
        """What all ranks contributed to the exchange of the step that is over now."""
        self._memory_due = self._memory_policy.is_due(sums, self._session.world_size)
        self._memory_policy.stepped(step_seconds)

    def keep_if_due(self, step: int, state: Callable[[], dict[str, Any]], *, samples: int, fingerprint: str) -> None:
        """Keep `state()` in memory as `step`, when it is time; all ranks do so, or none."""
        if self._memory_due:
            self.keep(step, state, samples=samples, fingerprint=fingerprint)

    def keep(self, step: int, state: Callable[[], dict[str, Any]], *, samples: int, fingerprint: str) -> None:
        """Copy `state()` into the node's memory as `step`, unless it is there already."""
        self._memory_policy.taken()
        if self._manager is None or self._memory_dir is None or step == self._kept_step:
            return
        began = time.perf_counter()
        with self._session.phase(Phase.CHECKPOINT):
            self._unsettled = True
            kept = self._manager.keep(
                step, state(), samples=samples, fingerprint=fingerprint, steady=self._steadiness.at_copy()
            )
        self._kept_step = step
        if kept is not None:
            sealing = self._seal_seconds if self._on_host else 0.0  # of the one before: on a processor of training's
            self._memory_policy.kept(time.perf_counter() - began + sealing)

    def wait(self) -> bool:
        """Block until the newest save is settled; False when it is not committed (reported and logged)."""
        if self._manager is None:
            return True
        with self._session.phase(Phase.CHECKPOINT, limit_seconds=self._hang_seconds):
            result = self._manager.wait(self._config.commit_timeout_seconds)
        return result is None or result.state == "committed"

    def forget_failure(self) -> None:
        """Let the step that is saved last be saved again. All ranks call it, or none."""
        self._saved_step = -1

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the commit in flight; when training failed only a moment, since peers may be gone too."""
        if self._manager is None:
            return
        if error is None:
            self._manager.close()
        else:
            with contextlib.suppress(RuntimeError):  # of a broken device: what matters is on its way up
                self._manager.wait(_SECONDS_FOR_COMMIT_AFTER_FAILURE)
        self._manager = None

    def _on_sealed(self, sealed: Sealed) -> None:
        """Called by the memory tier's thread."""
        self._seal_seconds = sealed.seal_seconds
        self._session.sealed(sealed)
