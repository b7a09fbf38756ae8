"""Watches this node's workers for one that hangs: hands what they report, and the clock, to `hang`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from elastic.agent import hang
from elastic.agent.crew import Crew
from elastic.agent.workers import Worker
from elastic.config import JobConfig

logger = logging.getLogger(__name__)

_NO_SESSION_SECONDS = 60.0  # a worker that has not made its session by then will hardly do so
_PAUSE_SECONDS = 1.0


class HangWatch:
    """Called by the agent's loop in each pass; `due` is when it must be called again at the latest."""

    def __init__(self, crew: Crew, config: JobConfig) -> None:
        self._crew = crew
        self._timeout = config.hang_timeout_seconds
        self._pause = max(_PAUSE_SECONDS, config.lease_ttl_seconds / 2)  # the loop passes more often than that
        self._looked_at = self._awake_since = time.monotonic()
        self._warned = False
        self.due: float | None = None

    def look(self, now: float) -> hang.Verdict | None:
        """A hang when it is found, once in a round; `crew.done.hung` keeps it."""
        self.due = None
        if now - self._looked_at > self._pause:
            self._awake_since = now  # the agent stood still, and so the workers may have
        self._looked_at = now
        alive, done = self._crew.workers.alive, self._crew.done
        if not (self._timeout and alive) or done.killed or done.announced or done.hung or self._crew.failed:
            return None
        self._warn_of_scripts(alive, now)
        done.hung, due = hang.look(
            [hang.Seen(report=worker.progress, stopped=_is_stopped(worker.pid)) for worker in alive],
            now=now,
            timeout_seconds=self._timeout,
            awake_since=self._awake_since,
        )
        self.due = now + self._timeout if due is None else due  # a first step may be done at any moment
        return done.hung

    def _warn_of_scripts(self, alive: Sequence[Worker], now: float) -> None:
        silent = [w.plan.rank for w in alive if not w.progress.pid and now - w.started_at > _NO_SESSION_SECONDS]
        if silent and not self._warned:
            self._warned = True
            logger.warning(
                "--hang-timeout has no effect on rank %d: it has no session (elastic.session()), so nothing tells "
                "whether it gets on",
                silent[0],
            )


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal or a debugger: T or t in /proc/PID/stat."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False
