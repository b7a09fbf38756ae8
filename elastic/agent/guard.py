"""Keeps a warden beside the agent for as long as the agent runs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable

from elastic.agent.mailbox import Mailbox
from elastic.agent.warden import Warden, boottime
from elastic.passing import lacks_room
from elastic.pidfd import end_of_child

logger = logging.getLogger(__name__)

KEY = "warden"
_GRAIN_SECONDS = 0.05  # deadlines that differ by less are the same one


class Guard:
    """Starts the warden, feeds it, and starts another when somebody kills it: workers must not be without one."""

    def __init__(self, mailbox: Mailbox, nonce: str, keep_open: tuple[int, ...]) -> None:
        """`keep_open`: descriptors the warden holds, so that locks outlive the agent as long as its workers do."""
        self._mailbox = mailbox
        self._nonce = nonce
        self._keep_open = keep_open
        self._groups: list[int] = []
        self._deadline = math.inf  # CLOCK_BOOTTIME, like the next
        self._fed_at = boottime()
        self._warden: Warden | None = None
        self._end = -1  # readable when the warden has ended
        self._is_wanted = self._has_complained = False

    def start(self) -> None:
        """Where this host has no room for one now, the next word to it is another try."""
        self._is_wanted, self._deadline = True, math.inf
        try:
            warden = Warden(self._nonce, keep_open=self._keep_open)
            try:
                self._end = end_of_child(warden.pid)
            except OSError:
                warden.kill()
                warden.close()
                raise
        except OSError as exc:
            if not lacks_room(exc):
                raise
            if not self._has_complained:
                logger.warning("no warden can be started now: %s; trying again", exc)
            self._has_complained = True
            return
        self._warden, self._has_complained = warden, False
        self._mailbox.watch(self._end, KEY)
        warden.groups(self._groups)

    def replace(self) -> None:
        """The warden has ended, though nobody told it to."""
        if self._warden is not None and self._warden.is_gone:
            logger.warning("the warden (pid %d) is gone: starting another", self._warden.pid)
            self.close()
            self.start()

    def restart(self) -> None:
        """Put a fresh warden in the place of one whose deadline has passed: when this returns no sweep is under way."""
        if self._warden is not None:
            self._warden.kill()
        self.close()
        self.start()

    def cover(self, groups: list[int]) -> None:
        """These process groups are the live workers now."""
        self._groups = groups
        self._say(lambda warden: warden.groups(groups))

    def allow_for(self, seconds: float) -> bool:
        """The workers may live for so long without another word. Returns False when that came too late.

        The clock is looked at once the warden has been told: wherever this process stood still before, the old deadline
        may have passed for the warden, and then it is not forgotten here (`is_overdue`).
        """
        now = boottime()
        deadline = now + seconds
        has_moved = abs(deadline - self._deadline) >= _GRAIN_SECONDS  # a busy loop must not fill the pipe
        if has_moved:
            self._say(lambda warden: warden.allow_until(deadline))
        if self.is_overdue:
            return False
        self._fed_at = now
        if has_moved:
            self._deadline = deadline
        return True

    @property
    def is_overdue(self) -> bool:
        """The deadline that the warden knows has passed: what it found is dead, or will be at any moment."""
        return boottime() >= self._deadline

    @property
    def silent_seconds(self) -> float:
        """How long ago the warden was last told anything by `allow_for`, suspended time included."""
        return boottime() - self._fed_at

    @property
    def pids(self) -> frozenset[int]:
        """What is not to be killed with the workers."""
        return frozenset() if self._warden is None else frozenset({self._warden.pid})

    def _say(self, how: Callable[[Warden], None]) -> None:
        if self._warden is None and self._is_wanted:
            self.start()
        if self._warden is None:
            return
        try:
            how(self._warden)
        except BlockingIOError:
            logger.warning("the warden (pid %d) does not listen: it is replaced", self._warden.pid)
            self._warden.kill()

    def close(self) -> None:
        """Everything is stopped."""
        self._is_wanted = False
        if self._warden is not None:
            self._mailbox.unwatch(self._end)
            self._warden.close()
            os.close(self._end)
            self._warden = None
