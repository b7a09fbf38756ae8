"""Waits before the agent's loop begins: for a lock, a file server, room. They hear signals and keep systemd patient."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from elastic.agent.mailbox import Mailbox, SignalReceived
from elastic.agent.systemd import Notifier
from elastic.errors import ElasticError, StorageGoneError
from elastic.passing import is_away, is_full, lacks_room

logger = logging.getLogger(__name__)

T = TypeVar("T")
_AGAIN_SECONDS = 1.0


class StoppedError(Exception):
    """A signal has asked for the end. Nothing had been started."""


class Start:
    """Who waits between the first signal that is heard and the agent's loop."""

    def __init__(self, mailbox: Mailbox, notifier: Notifier, *, usr1_drains: bool, patience_seconds: float) -> None:
        self._mailbox, self._notifier = mailbox, notifier
        self._ends = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, *([signal.SIGUSR1] if usr1_drains else [])}
        self._patience_seconds = patience_seconds

    def pause(self, seconds: float) -> None:
        """Raises: StoppedError."""
        deadline = time.monotonic() + seconds
        self._notifier.starting()
        while True:
            for event in self._mailbox.wait(deadline):
                if isinstance(event, SignalReceived) and event.number in self._ends:
                    raise StoppedError(f"received {event.number.name} before anything was started")
            if time.monotonic() >= deadline:
                return

    def reach(self, place: str, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, once the file server of `place` answers it.

        Raises: StorageGoneError when it never does, StoppedError, and what else `attempt` raises.
        """

        def gone(why: str, limit: float) -> ElasticError:
            return StorageGoneError(
                f"{place} has not answered for {limit:g} s (--join-timeout): {why}; check its file server"
            )

        return self._until(attempt, place, is_away, gone)

    def find_room(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, once this host has room for it; it leaves nothing behind when it fails.

        Raises: ElasticError when there never is any, StoppedError, and what else `attempt` raises.
        """

        def full(why: str, limit: float) -> ElasticError:
            return ElasticError(
                f"the agent could not be started for {limit:g} s (--join-timeout): {why}; see ulimit -n and -u, free "
                "memory, net.ipv4.ip_local_port_range, and the room in the runtime directory"
            )

        return self._until(attempt, "the agent cannot be started", _is_short, full)

    def _until(
        self,
        attempt: Callable[[], T],
        what: str,
        passes: Callable[[OSError], bool],
        given_up: Callable[[str, float], ElasticError],
    ) -> T:
        limit = self._patience_seconds
        deadline: float | None = None
        while True:
            try:
                result = attempt()
            except OSError as exc:
                if not passes(exc):
                    raise
                why = exc.strerror or str(exc)
                if deadline is None:
                    deadline = time.monotonic() + limit
                    logger.warning("%s: %s: it is tried until --join-timeout (%g s) is over", what, why, limit)
                if time.monotonic() >= deadline:
                    raise given_up(why, limit) from exc
            else:
                if deadline is not None:
                    logger.info("%s: that has passed", what)
                return result
            self.pause(_AGAIN_SECONDS)


def _is_short(error: OSError) -> bool:
    """As `lacks_room`, or on the disk."""
    return lacks_room(error, port=0) or is_full(error)
