"""A watch that stays: one thread that reads a stream of changes and makes the next one when it ends.

Owns the revisions to go on from, one for each key: etcd tells the keys of a stream one by one. Knows streams only as
iterators of `Batch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import tenacity

from elastic.errors import ElasticError, StoreUnavailableError
from elastic.passing import start_thread
from elastic.rendezvous.store import Event

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One message of a stream: that the watch is there, that it is not any more, changes, or only a revision."""

    place: int = 0  # of its key among those that are watched
    created: bool = False
    revision: int = 0  # up to which this stream has told everything; at its creation: the server's
    compacted: int = 0  # history before this revision is gone, and the watch with it
    cancelled: str = ""
    events: list[Event] = dataclasses.field(default_factory=list)


class Stream(Protocol):
    """Raises StoreUnavailableError or StoreRefusedError while it is read."""

    def __iter__(self) -> Iterator[Batch]: ...

    def cancel(self) -> None:
        """From any thread: reading it raises StoreUnavailableError."""


class Watcher(Protocol):
    """A connection that can watch."""

    def watch(self, keys: Sequence[str], prefix: bool, start_revisions: Sequence[int]) -> Stream: ...


class EtcdWatch:
    """See `Store.watch`. `borrow` lends a connection; `timeout_seconds` is for the server to confirm a new watch."""

    def __init__(
        self,
        keys: Sequence[str],
        *,
        prefix: bool,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
        borrow: Callable[[], AbstractContextManager[Watcher]],
        timeout_seconds: float,
    ) -> None:
        self._keys = tuple(keys)
        self._name = ", ".join(keys)
        self._prefix = prefix
        self._next = [after_revision + 1] * len(keys)
        self._on_events = on_events
        self._on_gap = on_gap
        self._borrow = borrow
        self._timeout_seconds = timeout_seconds
        self._closed = threading.Event()
        self._stream: Stream | None = None
        self._unconfirmed = len(keys)
        self._thread = threading.Thread(target=self._run, name=f"elasticd-watch {self._name}", daemon=True)

    def start(self) -> None:
        """Raises: StoreUnavailableError when this host has no room for a thread now; it is closed then."""
        try:
            start_thread(self._thread)
        except OSError as exc:
            self._closed.set()
            raise StoreUnavailableError(f"{self._name} cannot be watched: {exc}; see ulimit -u") from exc

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """See `Watch.close`."""
        self._closed.set()
        if (stream := self._stream) is not None:
            stream.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_seconds)

    def _run(self) -> None:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ElasticError),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=_LONGEST_PAUSE_SECONDS),
            stop=tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=self._complain,
        )
        while not self._closed.is_set():
            with contextlib.suppress(tenacity.RetryError):
                retrying(self._follow)
            # Also where a server confirms each watch and ends it at once there is a pause.
            self._closed.wait(random.uniform(0.02, 0.1))

    def _follow(self) -> None:
        """One stream. Returns when another one is due; raises when it was never confirmed: pauses grow then."""
        self._unconfirmed = len(self._keys)
        try:
            with self._borrow() as connection:
                self._read(connection.watch(self._keys, self._prefix, self._next))
        except ElasticError:
            if self._unconfirmed and not self._closed.is_set():
                raise
        except RuntimeError as exc:  # a stream has threads of its own, and a host may have no room for one now
            raise StoreUnavailableError(f"{self._name} cannot be watched: {exc}; see ulimit -u") from exc

    def _read(self, stream: Stream) -> None:
        self._stream = stream
        timer = threading.Timer(self._timeout_seconds, stream.cancel)  # a frozen server says nothing at all
        timer.daemon = True
        try:
            timer.start()
            for batch in stream:
                if self._closed.is_set() or not self._take(batch):
                    return
                if not self._unconfirmed:
                    timer.cancel()
            raise StoreUnavailableError(f"the watch of {self._name} ended")
        except StoreUnavailableError:
            if not self._closed.is_set():  # else it was cancelled by us, and the connection is good
                raise
        finally:
            self._stream = None
            timer.cancel()
            stream.cancel()

    def _take(self, batch: Batch) -> bool:
        """Whether the stream goes on after this."""
        place = batch.place
        if batch.compacted:
            return self._gap(place, batch.compacted + 1, "its history was compacted")
        if batch.cancelled:
            raise StoreUnavailableError(f"the watch of {self._name} was cancelled: {batch.cancelled}")
        if batch.created:
            self._unconfirmed -= 1
            if batch.revision + 1 < self._next[place]:
                return self._gap(place, batch.revision + 1, f"the store has gone back to revision {batch.revision}")
        elif batch.events:
            fresh = [event for event in batch.events if event.revision >= self._next[place]]
            self._next[place] = batch.events[-1].revision + 1
            if fresh:
                self._tell(lambda: self._on_events(fresh))
        else:
            self._next[place] = max(self._next[place], batch.revision + 1)
        return True

    def _gap(self, place: int, start_revision: int, reason: str) -> bool:
        """Go on from `start_revision` on another stream; what lies before is found by reading again."""
        key, last = self._keys[place], self._next[place] - 1
        logger.info("watch of %s: %s after revision %d; reading again", key, reason, last)
        self._next[place] = start_revision
        self._tell(self._on_gap)
        return False

    def _tell(self, callback: Callable[[], None]) -> None:
        if self._closed.is_set():
            return
        try:
            callback()
        except Exception:  # the thread must go on: the next change may be the one that ends the round
            logger.exception("watch of %s: a callback failed", self._name)

    def _complain(self, state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            logger.warning("watch of %s is down, trying again: %s", self._name, state.outcome.exception())
