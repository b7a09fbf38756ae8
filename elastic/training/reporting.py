"""What is told of each step: to the task, whose hook sees it first, and to the agent through the progress block."""

from __future__ import annotations

import dataclasses

from elastic.training.batching import MicroBatch, StepPlan
from elastic.training.precision import UpdateResult
from elastic.training.replica import Replica
from elastic.training.sampler import Sampler
from elastic.training.session import Session
from elastic.training.task import AppliedStep, Task
from elastic.training.training_state import Counters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step when it is over; all but `share` and `seconds` is the same on every rank."""

    plan: StepPlan
    share: tuple[MicroBatch, ...]  # this rank's
    loss: float
    weight: float
    learning_rate: float
    update: UpdateResult
    seconds: float


class Reporter:
    """Called once per step, between the update and any checkpoint of it."""

    def __init__(self, task: Task, session: Session, sampler: Sampler, replica: Replica) -> None:
        self._task, self._session, self._sampler, self._replica = task, session, sampler, replica

    def tell(self, outcome: StepOutcome, at: Counters) -> None:
        """`at` is where training stands after the step."""
        self._task.on_step(self._applied_step(outcome, at.step))
        comms = self._replica.comm_totals()
        self._session.report(
            step=at.step,
            epoch=outcome.plan.epoch,
            samples_total=at.position.samples,
            tokens_total=at.tokens,
            skipped_steps_total=at.skipped,
            loss=outcome.loss,
            learning_rate=outcome.learning_rate,
            grad_norm=outcome.update.grad_norm,
            step_seconds=outcome.seconds,
            comm_bytes_total=comms.bytes,
            comm_seconds_total=comms.seconds,
            comm_exposed_seconds_total=comms.exposed_seconds,
            grad_syncs_total=comms.syncs,
            grad_syncs_skipped_total=self._replica.syncs_skipped,
        )

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
