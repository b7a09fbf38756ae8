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
_WARN_SECONDS = 60.0


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
            self._warn(workers, now)

    def _patience(self, worker: Worker) -> float:
        if worker.plan.local_rank not in self._scripts:
            return _SCRIPT_SECONDS
        return _WARM_SECONDS if worker.was_warm else _AGAIN_SECONDS

    @property
    def last_words(self) -> str:
        """What a job has come to that was stopped with no step known of."""
        if self._scripts or (self._were_started and not self._with_session):
            return "its script had opened no session: without one, it goes on from its own last save"
        return "training had not begun yet: run it again to go on"

    def _warn(self, workers: Sequence[Worker], now: float) -> None:
        silent = [w for w in workers if w.is_alive and not w.progress.pid and now - w.started_at > _WARN_SECONDS]
        if not silent:
            return
        logger.warning(
            "rank %d has no session (elastic.session(), or the Trainer): %s",
            silent[0].plan.rank,
            "; ".join(self._useless),
        )
        self._useless = ()


def _what_needs_one(config: JobConfig) -> tuple[str, ...]:
    """The settings that do nothing for a script without a session, in words."""
    found = []
    if config.checkpoint_dir:
        names = "--checkpoint-dir and --checkpoint-every have" if config.checkpoint_every else "--checkpoint-dir has"
        found.append(f"{names} no effect, it saves what it saves by itself")
    if config.hang_timeout_seconds:
        found.append("--hang-timeout has no effect, nothing tells whether it gets on")
    return tuple(found)
