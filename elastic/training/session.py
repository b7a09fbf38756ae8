"""What a worker knows of its job, and what it says of itself.

Works under our agent, under plain torchrun, and alone. A training loop of your own becomes drainable and observable
with:

    session = elastic.session()
    checkpoints = CheckpointManager(session.checkpoint_dir or "ckpt", rank=session.rank, world_size=session.world_size,
                                    store=session.store(), on_result=session.committed)
    restored = checkpoints.restore(allow_fresh_start=session.allow_fresh_start)
    session.restored(restored)
    step = restored.step if restored else 0
    session.enter_loop(step=step, base_step=step)
    while step < 1000:
        pending = session.begin_agree(save=session.save_is_due(step + 1))
        train_one_step()                                    # the exchange runs beside the backward pass
        agreed, step = pending.wait(), step + 1
        session.report(step=step, loss=loss)
        if agreed.stop or agreed.save:
            checkpoints.save(step, state())
        if agreed.stop:
            checkpoints.wait()
            session.drained(step)
            break
    else:
        session.finished(step)

For checkpoints in memory, which a killed worker's successor goes on from, hand the manager

    memory=MemoryTier(session.memory_dir, local_rank=session.memory_rank, local_world_size=session.local_world_size,
                      on_sealed=session.sealed, on_failure=session.unsealed)

where `session.memory_dir` is not None, call `checkpoints.settle()` before `begin_agree`, and `checkpoints.keep(step,
state())` after each step that is not saved.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from elastic.errors import ElasticError
from elastic.journal import name_own_warnings
from elastic.progress import Outcome, Phase, ProgressWriter
from elastic.training.agreement import Agreement, AgreementChannel, PendingAgreement
from elastic.training.environment import WorkerEnvironment, read_environment
from elastic.training.phase_clock import DeviceSeconds, PhaseClock
from elastic.training.placement import Placement
from elastic.training.profiling import Profiling
from elastic.training.stop_signal import StopSignal

logger = logging.getLogger(__name__)

_PROFILE_SECONDS = 600.0  # to begin or to write one, which is no hang


class SealedLike(Protocol):
    """What is asked of a `checkpoints.memory.Sealed`."""

    @property
    def step(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def unix_time(self) -> float: ...


class CommitResultLike(SealedLike, Protocol):
    """What is asked of a `checkpoints.CommitResult`."""

    @property
    def state(self) -> str: ...
    @property
    def stall_seconds(self) -> float: ...
    @property
    def write_seconds(self) -> float: ...


class RestoredLike(Protocol):
    """What is asked of a `checkpoints.Restored`."""

    @property
    def step(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def disk_step(self) -> int: ...


class Session(Placement):
    """One worker's view of its round. Any thread may call `report` and `count`; the rest is for the training thread."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        timeout_seconds: float = 1800.0,
        progress: ProgressWriter | None = None,
    ) -> None:
        super().__init__(environment, under_agent=progress is not None or bool(environment.progress_path))
        self._progress = progress
        if progress is None and environment.progress_path:
            self._progress = ProgressWriter(Path(environment.progress_path))
        self._channel = AgreementChannel(world_size=environment.world_size, timeout_seconds=timeout_seconds)
        self._saves_seen = self._progress.saves_requested if self._progress else 0
        self._stop_signal = StopSignal()
        self._fatal: BaseException | None = None
        self._has_restored = False
        self._saved_at = time.monotonic() - environment.unsaved_seconds
        self._phase, self._phase_limit = Phase.STARTING, 0.0
        self._first_step = True
        self._clock = PhaseClock()
        self._profiling: Profiling | None = None
        if self._progress is not None:
            self._profiling = Profiling(self._progress, rank=environment.rank, pause=self._profile_pause)
        self._update(
            pid=os.getpid(),
            round=environment.round,
            rank=environment.rank,
            local_rank=environment.local_rank,
            world_size=environment.world_size,
            phase=Phase.STARTING,
            phase_since=time.monotonic(),
            started_at=time.monotonic(),
        )

    def enter_loop(self, *, step: int, base_step: int) -> None:
        """From now on a drain is a request seen by `agree`, not a kill. `base_step` is the step that was restored.

        Raises: ElasticError when that is none, though an earlier round has committed one.
        """
        committed = self._environment.committed_step
        if not base_step and committed and not self.allow_fresh_start:
            raise ElasticError(
                f"step {committed} was committed in an earlier round, and there is no checkpoint now: is "
                f"{self.checkpoint_dir or 'its directory'} mounted on this node? --allow-fresh-start begins at step 0"
            )
        if not self._environment.elastic or self.under_agent:
            self._stop_signal.take(under_agent=self.under_agent)
        if not self._has_restored:  # or has not said so: it is part of the start then
            self._note_restore("began")
            self._note_restore("ended")
        self._update(in_loop=1, step=step, base_step=base_step)
        self._clock.take()  # what came before belongs to no step

    def begin_agree(
        self,
        *,
        stop: bool = False,
        save: bool = False,
        busy: bool = False,
        error: bool = False,
        sums: Sequence[float] = (),
    ) -> PendingAgreement:
        """Contribute to the step's one exchange; every rank calls it once per step, with as many sums.

        The agent's requests are added here: drain as stop, USR1 as save. Call it after the last forward and wait before
        the optimizer's step: then it costs nothing.
        """
        profile = False
        if self._progress is not None:
            stop = stop or self._progress.drain_requested
            save = save or self._progress.saves_requested != self._saves_seen
            profile = self._profiling is not None and self._profiling.is_wanted
        flags = (stop or self._stop_signal.came, save, busy, error, profile)
        return self._channel.begin(flags, sums, self._after_agreement, self._waits)

    def _waits(self, begins: bool) -> None:
        """A wait for the other ranks begins or ends. The phase of waiting says so itself."""
        if self._phase is not Phase.COMM_EXPOSED:
            self._update(waits=int(begins), progressed_at=time.monotonic())

    def _after_agreement(self, agreement: Agreement) -> None:
        if agreement.profiles and self._profiling is not None:
            self._profiling.agreed(agreement.profiles)
        if agreement.save:
            self._saved_at = time.monotonic()
        if agreement.save and self._progress is not None:
            # Asked of all agents at once, seen a step apart: what arrived until here is answered by this one save.
            self._saves_seen = self._progress.saves_requested

    def agree(
        self,
        *,
        stop: bool = False,
        save: bool = False,
        busy: bool = False,
        error: bool = False,
        sums: Sequence[float] = (),
    ) -> Agreement:
        """`begin_agree` and `wait` in one: for loops that do not overlap it."""
        return self.begin_agree(stop=stop, save=save, busy=busy, error=error, sums=sums).wait()

    def save_is_due(self, step: int) -> bool:
        """What to contribute as `save` before `step` is applied, by --checkpoint-every: time is rank 0's."""
        every = self.checkpoint_every
        if every is None:
            return False
        if every.steps is not None:
            return step % every.steps == 0
        return self.rank == 0 and time.monotonic() - self._saved_at >= (every.seconds or 0.0)

    def restored(self, state: RestoredLike | None) -> None:
        """Tell the agent what training goes on from: what `CheckpointManager.restore` has returned."""
        if state is None:
            return
        if state.tier == "disk":
            self.note(disk_step=state.step)
            return
        is_ours = self.memory_dir is not None and state.path == str(Path(self.memory_dir).absolute())  # no peer's
        self.note(memory_step=state.step if is_ours else -1, disk_step=state.disk_step)

    def committed(self, result: CommitResultLike) -> None:
        """Tell the agent what a commit came to: `CheckpointManager(..., on_result=session.committed)`. Any thread.

        Without it the agent believes that nothing more is safe, and says so when the job is stopped.
        """
        if result.state == "committed":
            self.note(disk_step=result.step, commit_unix_time=result.unix_time, failed_saves=0)
        else:  # for all ranks at once
            self.count(failed_saves=1, checkpoint_failures_total=int(self.rank == 0))
        self.count(
            checkpoint_bytes_total=result.bytes,
            checkpoint_stall_seconds_total=result.stall_seconds,
            checkpoint_write_seconds_total=result.write_seconds,
        )
        self._observe({"checkpoint_stall": result.stall_seconds, "checkpoint_write": result.write_seconds})

    def sealed(self, share: SealedLike) -> None:
        """Tell the agent which step is whole in memory: `MemoryTier(..., on_sealed=session.sealed)`. Any thread."""
        self.note(memory_step=share.step, memory_unix_time=share.unix_time)
        self.count(memory_bytes_total=share.bytes)

    def unsealed(self, reason: str) -> None:
        """Tell the agent that memory is off on this rank: `MemoryTier(..., on_failure=session.unsealed)`. Any thread.

        Its peers' shares alone are no state, and what it has sealed before goes with theirs. `reason` is in the log.
        """
        self.note(memory_step=-1)
        self.count(memory_failures_total=1)

    def leave_group(self) -> None:
        """Called before `torch.distributed.destroy_process_group`."""
        if self._profiling is not None:
            self._profiling.close()
        self._channel.leave()

    def report(self, *, step: int, **fields: float) -> None:
        """Say that `step` was applied, with any fields of `elastic.progress.Progress`.

        The time since the last report is split by the phases that were entered: the step's, if it names any.
        """
        if self._progress is None:
            return
        now = time.monotonic()
        if self._first_step:
            self._first_step = False
            fields = {"first_step_at": now, **fields}
        self._progress.update(step=step, progressed_at=now, **fields)
        spent = self._clock.take()
        self._observe(spent)
        if self._profiling is not None and self._profiling.is_active:
            self._profiling.stepped(step, spent)

    def _profile_pause(self) -> AbstractContextManager[None]:
        """A profile begins or is written: that takes a while, and is no part of a step."""
        return self.phase(Phase.COMPILE, limit_seconds=_PROFILE_SECONDS)

    def measure_on_device(self, seconds: DeviceSeconds) -> None:
        """Where a device works on its own: how long the phases took there, asked at each report."""
        self._clock.device_seconds = seconds

    def count(self, **amounts: float) -> None:
        """Increase counters of the progress block."""
        if self._progress is not None:
            self._progress.add(**amounts)

    def note(self, **fields: float) -> None:
        """Set fields of the progress block other than the step."""
        self._update(**fields)

    def beat(self) -> None:
        """The training thread gets on. For what takes long between two steps: --hang-timeout counts from here."""
        self._update(progressed_at=time.monotonic())

    def enter_phase(self, phase: Phase, *, limit_seconds: float = 0.0, **fields: float) -> None:
        """Say what the worker does from now on, and for how long without a sign of progress that is no hang.

        Without a limit it is --hang-timeout, and ten times that in a phase that may take long: a checkpoint, an
        evaluation, a compilation.
        """
        now = time.monotonic()
        self._phase, self._phase_limit = phase, limit_seconds
        self._clock.enter(phase)
        self._update(phase=phase, phase_since=now, progressed_at=now, phase_limit=limit_seconds, **fields)

    @contextmanager
    def phase(self, phase: Phase, *, limit_seconds: float = 0.0) -> Iterator[None]:
        """Say what the worker does inside, and that it is back at what it did before."""
        before, limit_before = self._phase, self._phase_limit
        self.enter_phase(phase, limit_seconds=limit_seconds)
        if phase is Phase.RESTORE:
            self._note_restore("began")
        try:
            yield
            if phase is Phase.RESTORE:
                self._note_restore("ended")
        finally:
            self.enter_phase(before, limit_seconds=limit_before)

    def _note_restore(self, what: str) -> None:
        """For the account of a recovery: before the restore was the start, after it comes the first step."""
        self._has_restored = True
        self._update(**{f"restore_{what}_at": time.monotonic()})

    def drained(self, step: int) -> None:
        """The stop step is saved and this worker leaves on request; it should exit with 0."""
        self._update(outcome=Outcome.DRAINED, step=step)

    def finished(self, step: int) -> None:
        """Training is over; the worker should exit with 0."""
        self._update(outcome=Outcome.FINISHED, step=step)

    def fatal(self, error: BaseException) -> None:
        """A retry would fail the same way: the agent ends the job and spends no budget. Let `error` propagate.

        Called for you when the program ends with an exception whose `retry_is_useless` is true.
        """
        if error is self._fatal:
            return
        self._fatal = error
        logger.error("run=%s round=%s rank=%s cannot go on: %s", self.run_id, self.round, self.rank, error)
        self._update(outcome=Outcome.FATAL)

    def _observe(self, seconds: Mapping[str, float]) -> None:
        if self._progress is not None and seconds:
            self._progress.observe(seconds)

    def _update(self, **fields: float) -> None:
        if self._progress is not None:
            self._progress.update(**fields)


_lock = threading.Lock()
_session: Session | None = None


def session() -> Session:
    """The session of this process; made from the environment at the first call."""
    global _session
    with _lock:
        if _session is None:
            environment = read_environment(os.environ, os.getpid())
            if not environment.launched and dist.is_available() and dist.is_initialized():
                environment = dataclasses.replace(environment, rank=dist.get_rank(), world_size=dist.get_world_size())
            name_own_warnings()
            _session = Session(environment)
        return _session
