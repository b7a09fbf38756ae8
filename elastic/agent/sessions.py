"""Which of this node's workers have a session (elastic.session(), or the Trainer), and what follows for the others.

A script without one never says so, nor that it trains: it is taken for such a script once it has run for long enough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from elastic.agent.workers import Worker
from elastic.config import JobConfig

logger = logging.getLogger(__name__)

_SCRIPT_SECONDS = 10.0  # who has no session by then counts as running, though it may import still
_AGAIN_SECONDS = 5.0  # the same where it had none in an earlier round
_WARM_SECONDS = 2.0  # and has been a standby now


class Sessions:
    """`look` is called in each pass of the agent's loop."""

    def __init__(self, config: JobConfig) -> None:
        self._useless = _what_needs_one(config)
        self._scripts: set[int] = set()  # local ranks
        self._with_session: set[int] = set()
        self._were_started = False

    def look(self, workers: Sequence[Worker], now: float) -> None:
        """Mark who runs, which then stays so in its round; warn once of settings that do nothing."""
        for worker in workers:
            self._were_started = True
            local_rank, age = worker.plan.local_rank, now - worker.started_at
            if worker.progress.pid:
                self._with_session.add(local_rank)
                self._scripts.discard(local_rank)
            elif worker.is_alive and local_rank not in self._with_session and age > self._patience(worker):
                self._scripts.add(local_rank)
                worker.counts_as_running = True
            worker.counts_as_running |= bool(worker.progress.in_loop)
        if self._useless:
            self._warn(workers)

    def _patience(self, worker: Worker) -> float:
        if worker.plan.local_rank not in self._scripts:
            return _SCRIPT_SECONDS
        return _WARM_SECONDS if worker.was_warm else _AGAIN_SECONDS

    @property
    def last_words(self) -> str:
        """What a job has come to that was stopped with no step known of."""
        if self._scripts:
            return "its script had opened no session: without one, it goes on from its own last save"
        if self._were_started and not self._with_session:
            return "no session was open yet: training had not begun, or its script needs none and saves by itself"
        return "training had not begun yet: run it again to go on"

    def _warn(self, workers: Sequence[Worker]) -> None:
        silent = [worker for worker in workers if worker.plan.local_rank in self._scripts]
        if not silent:
            return
        logger.warning(
            "rank %d has opened no session so far: %s no effect until it does (elastic.session(), or the Trainer)",
            silent[0].plan.rank,
            self._useless,
        )
        self._useless = ""


def _what_needs_one(config: JobConfig) -> str:
    """The flags that were given and do nothing for a script without a session, with their verb; empty: none."""
    given = {
        "--checkpoint-dir": config.checkpoint_dir,
        "--checkpoint-every": config.checkpoint_every,
        "--memory-every": config.memory_every,
        "--hang-timeout": config.hang_timeout_seconds,
    }
    flags = [flag for flag, value in given.items() if value]
    if len(flags) < 2:
        return "".join(f"{flag} has" for flag in flags)
    return f"{', '.join(flags[:-1])} and {flags[-1]} have"
