"""The Trainer: restores, runs steps until the end or a drain, saves when due. `_train_step` is the whole of a step.

It owns the order of things alone; what each thing is lies beside it: who runs what (batching), which items (sampler,
loader), gradients on the wire (replica, comms), the update (stepper), checkpoints (saving), decisions (session).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic.errors import ElasticError, JobFailedError, NonFiniteGradientError, UsageError
from elastic.progress import Phase
from elastic.training import seeding
from elastic.training.agreement import Agreement
from elastic.training.assembly import check_world, choose_device, make_data, make_model, process_group
from elastic.training.batching import MicroBatch, StepPlan
from elastic.training.evaluation import Evaluator
from elastic.training.loader import Key, Stream
from elastic.training.memory_meter import MemoryMeter
from elastic.training.memory_policy import SLOTS
from elastic.training.pace import Pace
from elastic.training.precision import Stepper, UpdateResult, power_of_two_near
from elastic.training.replica import Replica
from elastic.training.reporting import DeviceParts, Reporter, StepOutcome
from elastic.training.saving import Saver
from elastic.training.schedule import LearningRate
from elastic.training.session import Session
from elastic.training.session import session as current_session
from elastic.training.state import is_sharded, steady_tensors
from elastic.training.task import AppliedStep, Evaluation, Task, checked_weight, collate_of
from elastic.training.trainer_config import TrainerConfig
from elastic.training.training_state import Counters, Trainee, capture, put_back

if TYPE_CHECKING:
    from checkpoints.storage import Storage

logger = logging.getLogger(__name__)
__all__ = ["AppliedStep", "Evaluation", "Task", "TrainResult", "Trainer", "TrainerConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How `Trainer.run` ended; the same on every rank."""

    step: int
    samples: int
    loss: float  # of the last step that this round ran
    drained: bool  # stopped on request: run again to go on
    evaluation: Evaluation | None


class Trainer:
    """Trains `task` as `config` says. Make one per process and call `run` once.

    `storage` is how checkpoints reach their directory, where the file system or the URL itself would not do.
    """

    def __init__(
        self, task: Task, config: TrainerConfig, *, session: Session | None = None, storage: Storage | None = None
    ) -> None:
        self._task, self._config = task, config
        self._session = session or current_session()
        self._storage = storage
        self._at = Counters()
        self._loss = float("nan")
        self._evaluation: Evaluation | None = None

    def run(self) -> TrainResult:
        """Train to the end, or until the ranks agree to stop; either way the last step is saved when this returns.

        Raises:
            UsageError, JobFailedError: a retry would fail the same way; the agent is told so.
        """
        try:
            check_world(self._config, self._session)
            self._device = choose_device(self._config, self._session)
            with ExitStack() as stack:
                stack.enter_context(process_group(self._config, self._session, self._device))
                self._build(stack)
                drained = self._loop()
                self._leave(drained)
        except (JobFailedError, UsageError) as error:
            self._session.fatal(error)
            raise
        return TrainResult(
            step=self._at.step,
            samples=self._at.position.samples,
            loss=self._loss,
            drained=drained,
            evaluation=self._evaluation,
        )

    # -- before the first step

    def _build(self, stack: ExitStack) -> None:
        """Make the round's objects, restore into them, and open what `stack` closes."""
        task, config, session = self._task, self._config, self._session
        self._data = make_data(task, config)
        model, self._optimizer = make_model(task, config, self._device)
        self._rate = LearningRate(task, config, self._optimizer, self._data.total_steps)
        self._stepper = Stepper(
            self._optimizer, precision=config.precision, clip_norm=config.grad_clip_norm, device=self._device
        )
        self._trainee = Trainee(task=task, config=config, model=model, optimizer=self._optimizer, stepper=self._stepper)
        self._saver = stack.enter_context(
            Saver(
                config,
                session,
                storage=self._storage,
                sharded=is_sharded(self._optimizer),
                on_host=self._device.type == "cpu",
                steady=lambda: steady_tensors(model, self._optimizer),
            )
        )
        self._saver.open()
        restored = self._saver.restore(like={"model": dict(model.state_dict())}, fingerprint=self._data.fingerprint)
        if restored is not None:
            self._at = put_back(self._trainee, restored.state)
        self._base_step = self._at.step
        self._replica = stack.enter_context(closing(self._make_replica(model)))
        self._pace = Pace(config, session, base_step=self._base_step, compute=self._replica.compute)
        memory = MemoryMeter(model, self._optimizer, self._device)
        self._reporter = Reporter(task, session, self._data.sampler, self._replica, memory.fields)
        if self._device.type == "cuda":
            session.measure_on_device(DeviceParts(self._replica, self._stepper).since_last)
        evaluation_data = task.evaluation_dataset() if config.evaluate_every else None
        self._evaluator = (
            Evaluator(task, evaluation_data, config, session, self._device) if evaluation_data is not None else None
        )
        self._stream = stack.enter_context(
            closing(
                Stream(
                    self._data.dataset,
                    self._keys(),
                    collate=collate_of(task),
                    config=config,
                    device=self._device,
                )
            )
        )
        self._warm_up()
        logger.info(
            "run=%s round=%s rank=%s step=%s training begins",
            session.run_id,
            session.round,
            session.rank,
            self._at.step,
        )

    def _make_replica(self, model: nn.Module) -> Replica:
        return Replica(
            model,
            self._config,
            world_size=self._session.world_size,
            device=self._device,
            on_compute_end=lambda: self._session.enter_phase(Phase.COMM_EXPOSED),
        )

    def _plans(self) -> Iterator[StepPlan]:
        """The steps that are left, from where training stands now."""
        return self._data.batching.remaining(
            self._at.position, step=self._at.step, steps=self._config.steps, epochs=self._config.epochs
        )

    def _micro_batches(self, plan: StepPlan) -> tuple[MicroBatch, ...]:
        """What this rank runs of a step: its share, or without one the step's first, which then does not count."""
        return self._pace.share(plan) or plan.micro_batches[:1]

    def _keys(self) -> Iterator[list[Key]]:
        """Of each micro-batch to come, its items. Runs ahead of training, so it keeps a sampler of its own."""
        sampler = self._data.new_sampler()
        return (
            [(micro.epoch, index) for index in sampler.indices(micro.epoch, micro.start, micro.stop)]
            for plan in self._plans()
            for micro in self._micro_batches(plan)
        )

    def _warm_up(self) -> None:
        """Run one micro-batch dry where that matters: to learn what a loss weighs, and to fix DDP's bucket order.

        With two ranks a sum does not depend on the order, so a resume need not wait for it.
        """
        plan = next(self._plans(), None)
        if plan is None or (self._at.nominal_weight and self._session.world_size < 3):
            return
        micro = self._micro_batches(plan)[0]
        with self._session.phase(Phase.COMPILE), seeding.preserved_random_state(), self._replica.dry():
            loss, weight = self._forward(micro, self._stream.peek())
            if self._replica.distributed:
                self._replica.backward(loss, counts=True, last=True)
        expected = weight * len(plan.micro_batches) if self._session.rank == 0 else 0.0
        agreed = self._session.agree(sums=(expected,))  # rank 0's counts
        if agreed.save:
            self._saver.policy.ask()
        self._at.nominal_weight = self._at.nominal_weight or power_of_two_near(agreed.sums[0])

    # -- steps

    def _loop(self) -> bool:
        """Run what is left; True when the ranks agreed to stop before the end."""
        if self._session.rank == 0 and next(self._plans(), None) is None:
            self._tell_that_all_is_done()
        self._session.enter_loop(step=self._at.step, base_step=self._base_step)
        for plan in self._plans():
            began = time.perf_counter()
            agreement = self._train_step(plan, began)
            if agreement.stop or self._save_and_evaluate(agreement):
                return True
        return False

    def _tell_that_all_is_done(self) -> None:
        """A run that was finished before and is started again ends at once, and well: it looks like training."""
        limits = {"steps": self._config.steps, "epochs": self._config.epochs}
        logger.warning(
            "nothing is left to train: step %s is done already (%s); raise that, or give another --checkpoint-dir",
            self._at.step,
            ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None),
        )

    def _forward(self, micro: MicroBatch, batch: Any) -> tuple[Any, float]:
        """(sum of losses, weight) of a micro-batch, whose random draws depend on nothing but its place in the data."""
        seeding.seed_all(seeding.derive(self._config.seed, seeding.MICRO_BATCH, micro.epoch, micro.start))
        with self._stepper.autocast():
            loss, weight = self._task.loss(self._replica.module, batch)
        return loss, checked_weight(weight)

    def _train_step(self, plan: StepPlan, began: float) -> Agreement:
        """One optimizer step: micro-steps, agreement, update, report.

        Gradients are synchronised in the last micro-step alone. The ranks' exchange runs beside that backward and is
        read before the update, so that all act on the same numbers after the same step.
        """
        session, replica, micro_batches = self._session, self._replica, self._micro_batches(plan)
        share = self._pace.share(plan)
        losses, weight_sum, tokens = [], 0.0, 0
        if plan.step == self._base_step + 2:
            with session.phase(Phase.COMM_EXPOSED):
                replica.rebuild_buckets()
        replica.begin_step(len(micro_batches))
        for i, micro in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            session.enter_phase(Phase.DATA, micro_step=i)
            batch = self._stream.next()
            session.enter_phase(Phase.FORWARD_BACKWARD)
            with replica.forward_context(last=last):
                loss, weight = self._forward(micro, batch)
                counts = bool(share) and weight > 0  # what does not count may be inf: it is never added or reduced
                if counts:
                    losses.append(loss.detach())
                    weight_sum, tokens = weight_sum + weight, tokens + self._task.tokens(batch)
                if last:
                    pending = session.begin_agree(
                        save=self._saver.policy.clock_says_save(),
                        busy=self._saver.busy,
                        sums=(
                            weight_sum,
                            sum(map(float, losses)),
                            tokens,
                            replica.buffers_changed(),
                            *self._saver.contribution(),
                            *self._pace.contribution(plan.step),
                        ),
                    )
                replica.backward(self._stepper.scaled(loss, 1 / self._at.nominal_weight), counts=counts, last=last)
        agreement = pending.wait()
        session.enter_phase(Phase.OPTIMIZER)  # until the next step, or what comes between
        weight_sum, loss_sum, all_tokens, buffers_changed, *more = agreement.sums
        memory_sums, rank_seconds = more[:SLOTS], more[SLOTS:]
        rate, result = self._update(weight_sum)
        if buffers_changed:
            with session.phase(Phase.COMM_EXPOSED):
                replica.broadcast_buffers()
        self._advance(plan, applied=result.applied, tokens=int(all_tokens))
        self._pace.stepped(plan, rank_seconds)
        self._loss = loss_sum / weight_sum if weight_sum > 0 else float("nan")
        outcome = StepOutcome(
            plan=plan,
            share=share,
            loss=self._loss,
            weight=weight_sum,
            tokens=tokens,
            learning_rate=rate,
            update=result,
            seconds=time.perf_counter() - began,
        )
        self._saver.heard(memory_sums, outcome.seconds)
        self._reporter.tell(outcome, self._at)
        return agreement

    def _update(self, weight: float) -> tuple[float, UpdateResult]:
        """Make the summed gradient that of the mean loss and apply it: (learning rate, what came of it)."""
        rate = self._rate.set(self._at.updates)
        if weight <= 0:
            return rate, UpdateResult(grad_norm=float("nan"), applied=False)
        result = self._stepper.update(self._replica.gradients(), self._at.nominal_weight / weight)
        if not result.applied and not self._stepper.has_scaler and self._config.nonfinite == "raise":
            raise NonFiniteGradientError(
                f"the gradient of step {self._at.step + 1} has norm {result.grad_norm}; look at the loss and the data "
                "of that step, clip or lower the learning rate, or set nonfinite='skip'"
            )
        return rate, result

    def _advance(self, plan: StepPlan, *, applied: bool, tokens: int) -> None:
        self._at = dataclasses.replace(
            self._at,
            step=self._at.step + 1,
            skipped=self._at.skipped + (not applied),
            tokens=self._at.tokens + tokens,
            position=plan.after,
        )

    # -- after a step

    def _save_and_evaluate(self, agreement: Agreement) -> bool:
        """What is due after this step; True when a stop was agreed on during the evaluation."""
        if self._saver.policy.decide(self._at.step, asked=agreement.save, busy=agreement.busy):
            self._save()
        else:
            self._save(self._saver.keep_if_due)
        if self._evaluator is None or self._at.step % (self._config.evaluate_every or 1):
            return False
        self._saver.settle(after_forward=False)  # an evaluation may put other weights into the model for a while
        with self._session.phase(Phase.EVALUATION):
            outcome = self._evaluator.run(self._replica.model, step=self._at.step, autocast=self._stepper.autocast)
        if outcome.save:
            self._saver.policy.ask()
        if outcome.evaluation is not None:
            self._evaluation = outcome.evaluation
            self._task.on_evaluation(outcome.evaluation)
        return outcome.stop

    def _save(self, save: Callable[..., None] | None = None) -> None:
        """Save, or what else is to be done with the state as it is now."""
        (save or self._saver.save)(
            self._at.step,
            lambda: capture(self._trainee, self._at),
            samples=self._at.position.samples,
            fingerprint=self._data.fingerprint,
        )

    def _leave(self, drained: bool) -> None:
        """Commit the last step, then say how it ended. All ranks come here after the same step."""
        if drained:
            self._session.enter_phase(Phase.DRAINING)
        self._save()
        if self._session.agree(error=not self._saver.wait()).error:
            self._saver.forget_failure()
            self._save()  # once more: nothing comes after it
        if not self._saver.wait():
            problem = f"step {self._at.step} could not be saved: the steps after the last checkpoint are lost"
            if not drained:  # a retry goes on from there; a drain is told by the agent's exit code
                raise ElasticError(problem)
            logger.error(
                "run=%s round=%s rank=%s %s", self._session.run_id, self._session.round, self._session.rank, problem
            )
        if drained:
            self._session.drained(self._at.step)
        else:
            self._session.finished(self._at.step)
