"""Compares how fast the ranks compute, every so many steps: names the slow ones, and deals by speed where asked to.

A rank's time is that of data, forward and backward of its micro-batches, without any waiting for others, averaged since
the last comparison. It travels as one slot of the step's exchange, so all ranks read the same numbers after the same
step. The first step of a round does not count, and the first comparison comes early.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from elastic.training.balance import Deal, Schedule, better_deal, slow_ranks, slowdowns
from elastic.training.batching import MicroBatch, StepPlan
from elastic.training.session import Session
from elastic.training.trainer_config import TrainerConfig

logger = logging.getLogger(__name__)
_FIRST_STEPS = 5  # of a round until the first comparison, where speed_every is more


class Pace:
    """Made once per round, which begins after `base_step`. `compute`: this rank's (seconds, micro-steps) so far."""

    def __init__(
        self, config: TrainerConfig, session: Session, *, base_step: int, compute: Callable[[], tuple[float, int]]
    ) -> None:
        self._config, self._session, self._base_step = config, session, base_step
        self._compute, self._before = compute, (0.0, 0)
        self._schedule = Schedule(Deal(world_size=session.world_size))
        self._slow: frozenset[int] = frozenset()
        # A loader worker is given so many micro-batches ahead, and a step has one at least on every rank.
        self._steps_ahead = config.loader_workers * config.loader_prefetch

    def share(self, plan: StepPlan) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step, in order; empty when there are more ranks than micro-batches."""
        start, stop = self._schedule.at(plan.step).bounds(len(plan.micro_batches), self._session.rank)
        return plan.micro_batches[start:stop]

    def contribution(self, step: int) -> list[float]:
        """What to add to the exchange of `step`: nothing, or a slot for each rank of which only its own is filled."""
        if not self._is_due(step):
            return []
        slots = [0.0] * self._session.world_size
        seconds, micro_steps = (now - then for now, then in zip(self._compute(), self._before, strict=True))
        if micro_steps:
            slots[self._session.rank] = seconds / micro_steps
        return slots

    def stepped(self, plan: StepPlan, seconds: Sequence[float]) -> None:
        """`plan` has been run; `seconds` is what the exchange made of the slots. Deals anew where that is due."""
        if seconds or plan.step == self._base_step + 1:
            self._before = self._compute()
        if seconds and all(value > 0 for value in seconds):
            self._compare(plan, seconds)

    def _is_due(self, step: int) -> bool:
        if self._session.world_size == 1:
            return False
        since = step - self._base_step
        every = self._config.speed_every
        return since % every == 0 or (since == _FIRST_STEPS and since < every)

    def _compare(self, plan: StepPlan, seconds: Sequence[float]) -> None:
        ratios, rank = slowdowns(seconds), self._session.rank
        self._session.note(compute_seconds=seconds[rank], slowdown=ratios[rank])
        slow = slow_ranks(seconds, self._config.straggler_factor)
        if slow != self._slow:
            self._tell(plan.step, slow, ratios, seconds)
        self._slow = slow
        if self._config.balance == "speed":
            self._deal_anew(plan, seconds)

    def _tell(self, step: int, slow: frozenset[int], ratios: Sequence[float], seconds: Sequence[float]) -> None:
        """Rank 0 says it of all; on another node than rank 0's so does who it is about, with the node's name."""
        session = self._session
        own, has_changed = session.rank, slow ^ self._slow
        told = {rank: f"rank {rank}" for rank in has_changed if own == 0}
        if own in has_changed and session.node_id and session.memory_rank != own:
            told[own] = f"rank {own} on {session.node_id}"
        where = f"run={session.run_id} round={session.round} step={step}"
        for rank, who in sorted(told.items()):
            if rank not in slow:
                logger.warning("%s %s is no longer slow", where, who)
                continue
            logger.warning(
                "%s %s is slow: %.1f ms for a micro-batch, %.1f x the median of the ranks",
                *(where, who, 1000 * seconds[rank], ratios[rank]),
            )

    def _deal_anew(self, plan: StepPlan, seconds: Sequence[float]) -> None:
        """From the first step of which no loader has seen anything yet."""
        before = self._schedule.newest
        deal = better_deal(before, seconds, len(plan.micro_batches))
        if deal is before:
            return
        from_step = plan.step + 1 + self._steps_ahead
        self._schedule.change(deal, from_step=from_step)
        if self._session.rank == 0:
            logger.info(
                "run=%s round=%s step=%s from step %d on the ranks are dealt %s micro-batches",
                self._session.run_id,
                self._session.round,
                plan.step,
                from_step,
                deal.counts(len(plan.micro_batches)),
            )
