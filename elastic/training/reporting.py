"""What is told of each step: to the task, whose hook sees it first, and to the agent through the progress block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic.training.batching import MicroBatch, StepPlan
from elastic.training.comms import CommTotals
from elastic.training.precision import Stepper, UpdateResult
from elastic.training.replica import Replica
from elastic.training.sampler import Sampler
from elastic.training.session import Session
from elastic.training.task import AppliedStep, Task
from elastic.training.training_state import Counters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step when it is over; all but `share`, `tokens` and `seconds` is the same on every rank."""

    plan: StepPlan
    share: tuple[MicroBatch, ...]  # this rank's
    loss: float
    weight: float
    tokens: int  # this rank's
    learning_rate: float
    update: UpdateResult
    seconds: float


class DeviceParts:
    """How long a device took for what its host cannot time, for `Session.measure_on_device`."""

    def __init__(self, replica: Replica, stepper: Stepper) -> None:
        self._replica, self._stepper = replica, stepper
        self._before = (0.0, 0.0)

    def since_last(self) -> dict[str, float]:
        """Seconds since the last call of what has passed: an update shows one step late."""
        comms = self._replica.comm_totals()
        now = (comms.exposed_seconds + comms.broadcast_seconds, self._stepper.seconds())
        exposed, optimizer = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return {"comm_exposed": exposed, "optimizer": optimizer}


class Reporter:
    """Called once per step, between the update and any checkpoint of it."""

    def __init__(
        self, task: Task, session: Session, sampler: Sampler, replica: Replica, memory: Callable[[], dict[str, float]]
    ) -> None:
        """`memory` gives the block's fields of memory, as often as it likes."""
        self._task, self._session, self._sampler, self._replica = task, session, sampler, replica
        self._memory = memory
        self._samples = self._tokens = self._skipped = 0
        self._comms_before = CommTotals()
        self._bus_bandwidth = float("nan")

    def tell(self, outcome: StepOutcome, at: Counters) -> None:
        """`at` is where training stands after the step."""
        self._task.on_step(self._applied_step(outcome, at.step))
        comms = self._replica.comm_totals()
        self._count(outcome, comms)
        self._session.report(
            step=at.step,
            epoch=outcome.plan.epoch,
            samples_total=self._samples,
            tokens_total=self._tokens,
            skipped_steps_total=self._skipped,
            loss=outcome.loss,
            learning_rate=outcome.learning_rate,
            grad_norm=outcome.update.grad_norm,
            step_seconds=outcome.seconds,
            comm_bytes_total=comms.bytes,
            comm_seconds_total=comms.seconds,
            comm_exposed_seconds_total=comms.exposed_seconds,
            grad_syncs_total=comms.syncs,
            grad_syncs_skipped_total=self._replica.syncs_skipped,
            broadcast_bytes_total=comms.broadcast_bytes,
            broadcast_seconds_total=comms.broadcast_seconds,
            bus_bandwidth=self._bus_bandwidth,
            **self._memory(),
        )

    def _count(self, outcome: StepOutcome, comms: CommTotals) -> None:
        """What this rank has done since the round began; what happens to all ranks at once is counted by one."""
        self._samples += sum(micro.stop - micro.start for micro in outcome.share)
        self._tokens += outcome.tokens
        if self._session.rank == 0:
            self._skipped += not outcome.update.applied
        sent, seconds = comms.bytes - self._comms_before.bytes, comms.seconds - self._comms_before.seconds
        if sent and seconds > 0:
            ranks = self._session.world_size
            self._bus_bandwidth = sent / seconds * 2 * (ranks - 1) / ranks  # of an all-reduce, as nccl-tests has it
            self._comms_before = comms

    def _applied_step(self, outcome: StepOutcome, step: int) -> AppliedStep:
        share, epoch = outcome.share, outcome.plan.epoch
        samples = self._sampler.indices(epoch, share[0].start, share[-1].stop) if share else []
        return AppliedStep(
            round=self._session.round,
            step=step,
            epoch=epoch,
            rank=self._session.rank,
            samples=tuple(samples),
            applied=outcome.update.applied,
            loss=outcome.loss,
            weight=outcome.weight,
            learning_rate=outcome.learning_rate,
            grad_norm=outcome.update.grad_norm,
        )
