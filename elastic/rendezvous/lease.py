"""This node's lease: renewed by one thread, and what may be believed of it while no answer comes.

All times are CLOCK_BOOTTIME, which goes on while the machine sleeps: the store's clock does not stop either.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from elastic.errors import ElasticError, StoreUnavailableError
from elastic.passing import start_thread
from elastic.rendezvous.store import Lease, Store, boottime

logger = logging.getLogger(__name__)

# Of the ttl without an answer: the job saves and stops while it still may. Not sooner: a cluster of etcd that has lost
# its leader answers nobody for up to two seconds (twice its election timeout), and none should stop for that.
DOUBT_SHARE = 0.6
FENCE_SHARE = 0.8  # of the ttl after the sending of the last answered renewal: all workers are dead by then
RENEWALS_PER_TTL = 6
_RETRIES_PER_TTL = 12  # after a failure that came at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The lease as the last answer left it."""

    ttl_seconds: int
    sent: float  # when the renewal was sent that was answered last
    due: float  # when to renew
    lost: bool = False
    doubted: bool = False  # DOUBT_SHARE of a ttl has passed without an answer, and it was said


class LeaseKeeper:
    """Keeps one lease alive.

    Renewing is the work of the keeper's own thread, from `start()` on, or of a test that calls `step()` instead. The
    callbacks come from that thread: `on_lost` once, when the store says that the lease is gone; `on_doubt` each time
    when it begins to be in doubt; `on_renewed(seconds)` after each answer, with the time it took.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        *,
        on_lost: Callable[[], None],
        on_doubt: Callable[[], None] = lambda: None,
        on_renewed: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self._store = store
        self._lease_id = lease.id
        self._on_lost = on_lost
        self._on_doubt = on_doubt
        self._on_renewed = on_renewed
        self._clock = clock
        ttl = lease.ttl_seconds
        self._state = _State(ttl_seconds=ttl, sent=lease.sent, due=lease.sent + ttl / RENEWALS_PER_TTL)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-lease", daemon=True)

    def start(self) -> None:
        """Raises: StoreUnavailableError when this host has no room for a thread now."""
        try:
            start_thread(self._thread)
        except OSError as exc:
            raise StoreUnavailableError(f"the lease cannot be renewed: {exc}; see ulimit -u") from exc

    @property
    def answered(self) -> float:
        """CLOCK_BOOTTIME of the sending of the last answered renewal, or of the asking for the lease."""
        return self._state.sent

    def fence(self) -> float:
        """CLOCK_BOOTTIME until which this node's workers may live. A lost lease does not move it."""
        return self._state.sent + FENCE_SHARE * self._state.ttl_seconds

    def in_doubt(self) -> bool:
        """Whether DOUBT_SHARE of a ttl has passed since the last answered renewal was sent."""
        return self._clock() >= self._state.sent + DOUBT_SHARE * self._state.ttl_seconds

    def step(self) -> float | None:
        """Do what is due. Returns seconds until something is due again, None when the lease is gone."""
        if not self._state.lost and self._clock() >= self._state.due:
            self._renew()
        if self._state.lost:
            return None
        if self.in_doubt() and not self._state.doubted:
            self._state = dataclasses.replace(self._state, doubted=True)
            away = self._clock() - self._state.sent
            logger.warning("lease %x: no answer for %.1f of its %d s", self._lease_id, away, self._state.ttl_seconds)
            self._on_doubt()
        state = self._state
        due = state.due if state.doubted else min(state.due, state.sent + DOUBT_SHARE * state.ttl_seconds)
        return max(0.0, due - self._clock())

    def close(self) -> None:
        """Stop renewing; the lease ends by itself, or is revoked by its owner. Idempotent."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0 * self._state.ttl_seconds)

    def _renew(self) -> None:
        state, now = self._state, self._clock()
        try:
            ttl = self._store.renew(self._lease_id, timeout_seconds=state.ttl_seconds / RENEWALS_PER_TTL)
        except ElasticError as exc:
            logger.debug("lease %x was not renewed: %s", self._lease_id, exc)
            later = max(self._clock(), now + state.ttl_seconds / _RETRIES_PER_TTL)
            self._state = dataclasses.replace(state, due=later)
            return
        if ttl <= 0:
            self._state = dataclasses.replace(state, lost=True)
            logger.warning("lease %x is gone", self._lease_id)
            self._on_lost()
            return
        self._state = _State(ttl_seconds=ttl, sent=now, due=now + ttl / RENEWALS_PER_TTL)
        self._on_renewed(self._clock() - now)

    def _run(self) -> None:
        wait: float | None = 0.0
        while wait is not None and not self._closed.wait(wait):
            wait = self.step()
