"""Waits before the agent's loop begins: for a lock, for a file server. They hear signals and keep systemd patient."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from elastic.agent.mailbox import Mailbox, SignalReceived
from elastic.agent.systemd import Notifier
from elastic.errors import StorageGoneError
from elastic.passing import is_away

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
        away_since: float | None = None
        while True:
            try:
                result = attempt()
            except OSError as exc:
                if not is_away(exc):
                    raise
                away_since = self._wait_for_answer(place, exc, away_since)
                continue
            if away_since is not None:
                logger.info("%s is there again", place)
            return result

    def _wait_for_answer(self, place: str, why: OSError, since: float | None) -> float:
        now, limit = time.monotonic(), self._patience_seconds
        if since is None:
            since = now
            logger.warning(
                "%s: %s: it is tried until --join-timeout (%g s) is over; check its file server",
                place,
                why.strerror or why,
                limit,
            )
        if now - since >= limit:
            raise StorageGoneError(
                f"{place} has not answered for {now - since:.0f} s (--join-timeout {limit:g}): {why.strerror or why}; "
                "check its file server"
            ) from why
        self.pause(_AGAIN_SECONDS)
        return since
