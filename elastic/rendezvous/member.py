"""This node's membership on a store: the agent's contract on one side, the protocol on the other, a thread between.

The agent's calls are noted and return; one thread does everything that may wait for the store. `view` is made from
memory, and what depends on the time alone (the store is away, too few nodes for too long) is worked out there, so that
it shows even while the thread hangs in a call. Invariant: the thread alone touches the participant.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from elastic.errors import ElasticError, NotEnoughNodesError, StoreGoneError
from elastic.passing import start_thread
from elastic.rendezvous.holding import MakeKeeper
from elastic.rendezvous.lease import FENCE_SHARE
from elastic.rendezvous.membership import Breakage, View, Waiting
from elastic.rendezvous.participant import Participant, Settings
from elastic.rendezvous.records import Keys
from elastic.rendezvous.round import Phase
from elastic.rendezvous.state import State
from elastic.rendezvous.store import Store, boottime

logger = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 60.0
_SILENT_SECONDS = 2.0  # then the store is said to be away, and nobody who leaves waits for it
_JOIN_SECONDS = 30.0


class Member:
    """A membership on a store. Owns its thread and its lease; closes the store it is given."""

    def __init__(
        self,
        *,
        store: Store,
        run_id: str,
        settings: Settings,
        join_timeout_seconds: float,
        make_keeper: MakeKeeper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._settings = settings
        self._join_timeout_seconds = join_timeout_seconds
        self._clock = clock
        self._wakeup = threading.Event()
        self._closes_at: float | None = None  # when the thread ends at the latest; None: it is to go on
        self._is_silence_told = self._is_shortage_told = False
        self._on_change: Callable[[], None] = lambda: None
        self._participant = Participant(
            store=store,
            keys=Keys(run_id),
            settings=settings,
            make_keeper=make_keeper,
            clock=clock,
            wake=self._wakeup.set,
        )
        self._shown = self._participant.state
        self._thread = threading.Thread(target=self._run, name="elasticd-member", daemon=True)

    # The contract.

    def open(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._start()

    def join(self, *, after: int, store_port: int, ready: bool = True) -> None:
        self._participant.post(lambda: self._participant.join(after=after, store_port=store_port, ready=ready))

    def ready(self) -> None:
        self._participant.post(self._participant.ready)

    def announce(self, breakage: Breakage) -> None:
        self._participant.post(lambda: self._participant.announce(breakage))

    def done(self) -> None:
        self._participant.post(self._participant.done)

    def leaving(self) -> None:
        self._participant.post(self._participant.leaving)

    def leave(self, *, outcome: str) -> None:
        """`outcome` is for memberships that close the job with it; here the other nodes go on."""
        logger.info("node %s leaves: %s", self._shown.node.node_id, outcome)
        self._participant.post(self._participant.leave)

    def view(self) -> View:
        state, now = self._shown, self._clock()
        rules, current = self._settings.rules, state.round
        closed = current is not None and current.phase is Phase.CLOSED
        return View(
            round=current,
            nodes=state.nodes,
            waiting=self._waiting(state, now),
            restarts_used=state.news.used if state.news and state.news.incarnation == state.incarnation else 0,
            restarts_limit=rules.max_restarts,
            restart_window_seconds=rules.restart_window_seconds,
            node_id=state.node.node_id,
            node_rank=current.seat_of(state.node.node_id, state.node.join) if current is not None else None,
            incarnation=state.incarnation,
            is_leader=state.is_leader,
            is_spare=state.is_spare(rules.limits.max_nodes),
            is_expelled=state.is_expelled,
            drain_wanted=self._drain_wanted(),
            outcome=current.outcome if current is not None and closed else "",
            exit_code=current.exit_code if current is not None else 0,
            error=self._error(state, now),
        )

    def pump(self, now: float) -> float | None:
        """The thread does what is due, once there is room for it."""
        if self._thread.ident is None and self._closes_at is None:
            self._start()
        return None

    def fence(self, now: float) -> float:
        """No later than the lease allows; where there is none there is nothing to lose but the agent's own pulse."""
        allowed = now + FENCE_SHARE * self._settings.ttl_seconds
        keeper = self._participant.keeper
        return allowed if keeper is None else min(allowed, self._clock() + keeper.fence() - boottime())

    def close(self) -> None:
        """Let go of the lease, if the store answers soon, and end the thread. What is not given back ends by itself."""
        if self._closes_at is not None:
            return
        self._on_change = lambda: None
        self._participant.post(self._participant.leave)
        now = self._clock()
        is_silent = self._away_seconds(self._shown, now) > _SILENT_SECONDS
        patience = _SILENT_SECONDS if is_silent else float(self._settings.ttl_seconds)
        self._closes_at = now + patience
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(patience)
            self._store.close()  # a call that still hangs fails now
            self._thread.join(_JOIN_SECONDS)
        else:
            self._store.close()

    # The thread.

    def _start(self) -> None:
        try:
            start_thread(self._thread)
        except OSError as exc:
            if not self._is_shortage_told:
                logger.warning("node %s cannot join now: %s; trying again", self._settings.node.node_id, exc)
            self._is_shortage_told = True

    def _run(self) -> None:
        participant = self._participant
        try:
            while True:
                self._wakeup.clear()
                due = participant.work()
                self._show(participant.state)
                self._tell_of_silence()
                state, closes_at = participant.state, self._closes_at
                if closes_at is not None and (state.has_left or state.error or self._clock() >= closes_at):
                    break
                pause = _LONGEST_WAIT_SECONDS if due is None else max(0.0, due - self._clock())
                self._wakeup.wait(min(pause, _LONGEST_WAIT_SECONDS))
        except Exception as exc:  # the top of a thread: its failure reaches the agent
            logger.exception("the membership of node %s has failed", self._shown.node.node_id)
            error = exc if isinstance(exc, ElasticError) else ElasticError(f"the membership has failed: {exc!r}")
            self._show(dataclasses.replace(participant.state, error=error))
        finally:
            participant.close()

    def _show(self, state: State) -> None:
        before, self._shown = self._shown, state
        if dataclasses.replace(state, answered_at=before.answered_at) != before:
            self._on_change()

    def _tell_of_silence(self) -> None:
        """A warning when the store has been away for a moment, and a word when it is back."""
        trouble, node_id = self._participant.trouble, self._shown.node.node_id
        away = self._away_seconds(self._shown, self._clock())
        if trouble and away > _SILENT_SECONDS and not self._is_silence_told:
            self._is_silence_told = True
            logger.warning(
                "node %s: etcd has not answered for %.0f s (%s): it is tried until --join-timeout (%g s) is over; "
                "check its servers, --rdzv-endpoint",
                node_id,
                away,
                trouble,
                self._join_timeout_seconds,
            )
        elif not trouble and self._is_silence_told:
            self._is_silence_told = False
            logger.info("node %s: etcd answers again", node_id)

    # What the time alone says.

    def _away_seconds(self, state: State, now: float) -> float:
        """For how long the store has not answered: neither the thread nor the lease's renewals."""
        away = now - state.answered_at
        keeper = self._participant.keeper
        return away if keeper is None else max(0.0, min(away, boottime() - keeper.answered))

    def _drain_wanted(self) -> bool:
        keeper = self._participant.keeper
        return keeper is not None and keeper.in_doubt()

    def _waiting(self, state: State, now: float) -> tuple[Waiting, ...]:
        away = self._away_seconds(state, now)
        if state.is_joined and away > _SILENT_SECONDS and self._participant.trouble:
            reason = f"etcd has not answered for {away:.0f} s"
            return (Waiting(node_id=state.node.node_id, reason=reason),)
        return state.news.waiting if state.news is not None else ()

    def _error(self, state: State, now: float) -> ElasticError | None:
        limit = self._join_timeout_seconds
        if state.error is not None or state.has_left:
            return state.error
        away = self._away_seconds(state, now)
        if away > limit:
            trouble = self._participant.trouble
            return StoreGoneError(
                f"etcd has not answered for {away:.0f} s (--join-timeout {limit:g}{trouble and ': '}{trouble}): "
                "check its servers, --rdzv-endpoint"
            )
        if state.short_since is not None and now - state.short_since > limit:
            there = state.news.short if state.news is not None and state.news.short else "fewer than MIN nodes"
            return NotEnoughNodesError(
                f"{there} are there after {limit:g} s (--join-timeout): start more, or lower MIN"
            )
        return None
