"""Membership for one node: the same contract, no server.

Rounds are decided by the same pure functions as on many nodes; the budget's window runs on this process's clock.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable

from elastic.rendezvous.membership import Breakage, View, Waiting
from elastic.rendezvous.round import (
    Budget,
    Limits,
    Node,
    Phase,
    Round,
    advance,
    backoff_seconds,
    budget_spent,
    next_round,
)

logger = logging.getLogger(__name__)


class Standalone:
    """One node that is leader, member and store host at once.

    `fence_seconds` is how long workers may outlive the last finished pass of the agent's loop: there is no lease to
    lose, but a frozen agent can no longer answer for its workers.
    """

    def __init__(
        self,
        *,
        node: Node,
        incarnation: str,
        first_number: int,
        budget: Budget,
        fence_seconds: float,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._first_number = first_number
        self._budget = budget
        self._fence_seconds = fence_seconds
        self._clock = clock
        self._jitter = jitter
        self._round: Round | None = None
        self._failures_without_progress = 0
        self._joining_since: float | None = None
        self._not_before = 0.0
        self._on_change: Callable[[], None] = lambda: None

    def open(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def join(self, *, after: int, store_port: int, ready: bool = True) -> None:
        self._node = dataclasses.replace(self._node, after=after, store_port=store_port, ready=ready)
        self._joining_since = self._clock()
        self.pump(self._joining_since)

    def ready(self) -> None:
        """One node waits for nobody."""

    def announce(self, breakage: Breakage) -> None:
        if self._round is None or self._round.phase in (Phase.BROKEN, Phase.CLOSED):
            return
        now = self._clock()
        if breakage.charged:
            self._budget = self._budget.charge(now)
            self._failures_without_progress = 1 if breakage.progressed else self._failures_without_progress + 1
        # The first failure after progress is answered at once; only a failure that repeats is slowed down.
        self._not_before = now + backoff_seconds(self._failures_without_progress - 1, self._jitter())
        self._set(advance(self._round, Phase.BROKEN, breakage.cause))
        if breakage.fatal or self._budget.is_spent(now):
            budget, cause = self._budget, breakage.cause
            if not breakage.fatal:
                cause = budget_spent(budget.used(now), budget.limit, budget.window_seconds, cause)
            closed = advance(self._round, Phase.CLOSED, cause, outcome="failed")
            self._set(dataclasses.replace(closed, exit_code=breakage.exit_code))

    def done(self) -> None:
        if self._round is not None:
            self._set(advance(self._round, Phase.CLOSED, "all members are done", outcome="succeeded"))

    def leaving(self) -> None:
        """The agent drains its own workers; there is nobody to tell."""

    def leave(self, *, outcome: str) -> None:
        self._joining_since = None
        if self._round is not None:
            self._set(advance(self._round, Phase.CLOSED, "the node left", outcome=outcome))

    def view(self) -> View:
        waiting: tuple[Waiting, ...] = ()
        now = self._clock()
        if self._joining_since is not None and now < self._not_before:
            reason = f"back-off after repeated failures: {self._not_before - now:.1f} s left"
            waiting = (Waiting(node_id=self._node.node_id, reason=reason),)
        return View(
            round=self._round,
            nodes=(self._node,),
            waiting=waiting,
            restarts_used=self._budget.used(now),
            restarts_limit=self._budget.limit,
            restart_window_seconds=self._budget.window_seconds,
            node_id=self._node.node_id,
            node_rank=0 if self._round is not None else None,
            incarnation=self._incarnation,
            is_leader=True,
            outcome=self._round.outcome if self._round is not None else "",
            exit_code=self._round.exit_code if self._round is not None else 0,
        )

    def pump(self, now: float) -> float | None:
        if self._joining_since is None:
            return None
        if now < self._not_before:
            return self._not_before
        decided = next_round(
            self._round,
            {self._node.node_id: self._node},
            Limits(min_nodes=1, max_nodes=1),
            incarnation=self._incarnation,
            first_number=self._first_number,
            cause=self._cause_of_next(),
        )
        if decided is None:
            return None
        self._joining_since = None
        self._set(decided)
        return None

    def _cause_of_next(self) -> str:
        if self._round is None:
            return "started"
        if self._round.phase is Phase.RUNNING:  # nothing has been announced
            return "the workers have saved and left, though nobody asked this agent: SIGTERM to them alone?"
        return self._round.cause

    def fence(self, now: float) -> float:
        return now + self._fence_seconds

    def close(self) -> None:
        self._on_change = lambda: None

    def _set(self, decided: Round) -> None:
        if decided != self._round:
            self._round = decided
            self._on_change()
