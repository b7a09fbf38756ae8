"""The pool of warm standbys: one process per local rank that has imported all that a worker needs, and waits.

Owns when one is started, replaced and given away; what it does is in `standby.py`. None there is never a failure: the
worker then starts cold.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

from elastic.agent.child import Birth, Child
from elastic.agent.mailbox import Mailbox, Readable

logger = logging.getLogger(__name__)

_WARM_SECONDS = 120.0  # a preload over a slow network may take long
_LOOK_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


@dataclasses.dataclass(slots=True, eq=False)
class _Standby:
    child: Child
    deadline: float  # CLOCK_MONOTONIC: warm by then, or replaced


class Standbys:
    """Used by the agent's loop alone."""

    def __init__(self, mailbox: Mailbox, preload: tuple[str, ...]) -> None:
        self._mailbox = mailbox
        self._preload = preload
        self._all: dict[int, _Standby] = {}  # by local rank
        self._failures = 0
        self._not_before = 0.0
        self._looked_at = 0.0
        self._complained: set[str] = set()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(standby.child.pid for standby in self._all.values())

    @property
    def warm(self) -> frozenset[int]:
        """Their pids: those that have said so."""
        return frozenset(standby.child.pid for standby in self._all.values() if standby.child.is_warm)

    @property
    def warm_ranks(self) -> frozenset[int]:
        """The local ranks that they wait for."""
        return frozenset(local_rank for local_rank, standby in self._all.items() if standby.child.is_warm)

    def are_ready(self, births: Mapping[int, Birth]) -> bool:
        """Whether each of these could be started warm now, or there is no hope of that soon."""
        return self._failures > 0 or all(
            local_rank in self._all and self._all[local_rank].child.is_warm for local_rank in births
        )

    def take(self, local_rank: int, birth: Birth) -> Child | None:
        """A process for this worker, which is a standby no longer; None: there is none that would do.

        One that is still warming up goes on with it and starts then: sooner than a cold one, which would compete with
        it. Not with preload modules: nobody knows how long they take, and whether they come to an end.
        """
        standby = self._all.get(local_rank)
        if standby is None or standby.child.birth != birth or (self._preload and not standby.child.is_warm):
            return None
        if not standby.child.is_waiting:
            self._drop(local_rank, "is stopped or gone")
            return None
        self._forget(local_rank)
        return standby.child

    def tend(self, births: Mapping[int, Birth]) -> None:
        """Replace who does not answer or does not fit any more, and start the next one that is missing, one at a time.

        Called often, while the workers are in their loop: what an import costs is taken from them.
        """
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._look(births, now)
        if now < self._not_before or not all(standby.child.is_warm for standby in self._all.values()):
            return
        for local_rank, birth in births.items():
            if local_rank not in self._all:
                self._start(local_rank, birth, now)
                return

    def collect(self, events: list[object]) -> None:
        """Who said that it is ready, and who is gone."""
        for event in events:
            if not isinstance(event, Readable) or not isinstance(event.key, _Standby):
                continue
            for local_rank, standby in list(self._all.items()):
                if standby is event.key:
                    self._hear(local_rank, standby)

    def close(self) -> None:
        """No standby is needed any more."""
        for local_rank in list(self._all):
            self._forget(local_rank).child.end()

    def _look(self, births: Mapping[int, Birth], now: float) -> None:
        for local_rank, standby in list(self._all.items()):
            if births.get(local_rank) != standby.child.birth:
                self._forget(local_rank).child.end()
            elif not standby.child.is_warm and now >= standby.deadline:
                self._drop(local_rank, f"was not warm after {_WARM_SECONDS:.0f} s")
            elif standby.child.is_warm and not standby.child.is_waiting:
                self._drop(local_rank, "is stopped or gone")

    def _start(self, local_rank: int, birth: Birth, now: float) -> None:
        try:
            child = Child(birth, preload=self._preload)
        except OSError as exc:
            self._fail(local_rank, f"cannot be started: {exc}")
            return
        self._all[local_rank] = standby = _Standby(child, deadline=now + _WARM_SECONDS)
        self._mailbox.watch(child.fileno(), standby)

    def _hear(self, local_rank: int, standby: _Standby) -> None:
        failed = standby.child.answer()
        if failed is None:
            self._forget(local_rank).child.end()
            self._fail(local_rank, f"ended with {standby.child.process.returncode}")
            return
        standby.child.is_warm, self._failures = True, 0
        logger.info("the standby of local rank %d (pid %d) is warm", local_rank, standby.child.pid)
        for name, error in failed.items():
            if name not in self._complained:
                self._complained.add(name)
                logger.warning("--preload %s: standbys go on without it: %s", name, error)

    def _drop(self, local_rank: int, why: str) -> None:
        self._forget(local_rank).child.end()
        self._fail(local_rank, why)

    def _fail(self, local_rank: int, why: str) -> None:
        """Another one is started after a pause, which grows with each failure in a row."""
        self._failures += 1
        pause = min(2.0 ** (self._failures - 1), _LONGEST_PAUSE_SECONDS)
        self._not_before = time.monotonic() + pause
        logger.warning("the standby of local rank %d %s; the next try is in %.0f s", local_rank, why, pause)

    def _forget(self, local_rank: int) -> _Standby:
        standby = self._all.pop(local_rank)
        self._mailbox.unwatch(standby.child.fileno())
        return standby
