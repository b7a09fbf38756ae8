"""Who has seen which round: counted in one process, by the threads of all its agents."""

from __future__ import annotations

import threading
import time


class Sightings:
    """How many agents have seen a running round of so many members with a seat for them, and when the last one did."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._seen: dict[int, list[float]] = {}

    def note(self, members: int) -> None:
        """One agent sees such a round now, for the first time."""
        with self._condition:
            self._seen.setdefault(members, []).append(time.monotonic())
            self._condition.notify_all()

    def wait(self, members: int, agents: int, seconds: float) -> float | None:
        """Monotonic time at which the last of so many agents saw it; None when that is not within the time."""
        with self._condition:
            if self._condition.wait_for(lambda: len(self._seen.get(members, [])) >= agents, seconds):
                return max(self._seen[members], default=0.0)
            return None
