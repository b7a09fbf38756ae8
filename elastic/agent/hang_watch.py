"""Watches this node's workers for one that hangs: hands what they report, and the clock, to `hang`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from elastic.agent import hang
from elastic.agent.crew import Crew
from elastic.config import JobConfig

_PAUSE_SECONDS = 1.0


class HangWatch:
    """Called by the agent's loop in each pass; `due` is when it must be called again at the latest."""

    def __init__(self, crew: Crew, config: JobConfig) -> None:
        self._crew = crew
        self._timeout = config.hang_timeout_seconds
        self._pause = max(_PAUSE_SECONDS, config.lease_ttl_seconds / 2)  # the loop passes more often than that
        self._looked_at = self._awake_since = time.monotonic()
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
        done.hung, due = hang.look(
            [hang.Seen(report=worker.progress, stopped=_is_stopped(worker.pid)) for worker in alive],
            now=now,
            timeout_seconds=self._timeout,
            awake_since=self._awake_since,
        )
        self.due = now + self._timeout if due is None else due  # a first step may be done at any moment
        return done.hung


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal or a debugger: T or t in /proc/PID/stat."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False
