"""Watches that stay: one thread reads one stream for all the watches of a store, and makes the next when that ends.

Owns the revisions to go on from, one for each key: etcd tells the keys of a stream one by one. Knows streams only as
iterators of `Batch`. A stream that ends takes every watch to the next one; none of them misses anything by that.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import random
import threading
import time
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
    """One message of a stream: that a key is watched, that it is not any more, changes, or only a revision."""

    watch_id: int = 0  # of the key; given out by the server with `created`
    created: bool = False  # in the order of the requests
    revision: int = 0  # up to which this stream has told everything; at its creation: the server's
    compacted: int = 0  # history before this revision is gone, and the key is not watched any more
    cancelled: str = ""
    events: list[Event] = dataclasses.field(default_factory=list)


class Stream(Protocol):
    """Raises StoreUnavailableError or StoreRefusedError while it is read. The other calls may come from any thread."""

    def __iter__(self) -> Iterator[Batch]: ...

    def request(self, key: str, prefix: bool, start_revision: int) -> None:
        """Have a key watched as well, or with `prefix` all that begin with it."""

    def release(self, watch_id: int) -> None:
        """Have it watched no more; what is on its way may still come."""

    def cancel(self) -> None:
        """Reading it raises StoreUnavailableError."""


class Watcher(Protocol):
    """A connection that can watch."""

    def watch(self) -> Stream: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """One key of a watch, as a stream has been asked for it."""

    watch: EtcdWatch
    number: int  # of the key in its watch
    asked_at: float  # monotonic


class EtcdWatch:
    """See `Store.watch`; made by `Watches.add`, whose thread calls back."""

    def __init__(
        self,
        owner: Watches,
        keys: Sequence[str],
        prefix: bool,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._on_events = on_events
        self._on_gap = on_gap
        self._closed = threading.Event()
        self._telling = threading.RLock()
        self.keys = tuple(keys)
        self.prefix = prefix
        self.next_revisions = [after_revision + 1] * len(keys)  # the owner's thread alone changes them

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """See `Watch.close`."""
        self._closed.set()
        self._owner.drop(self)
        if self._telling.acquire(timeout=self._owner.timeout_seconds):  # a callback that has begun ends first
            self._telling.release()

    def take(self, number: int, events: list[Event]) -> None:
        """Changes of one of its keys; those that were told before are left out."""
        fresh = [event for event in events if event.revision >= self.next_revisions[number]]
        self.next_revisions[number] = events[-1].revision + 1
        if fresh:
            self._tell(lambda: self._on_events(fresh))

    def go_on_from(self, start_revision: int, reason: str, is_cut_off: Callable[[int], bool]) -> None:
        """What lies before can only be found by reading again, for those keys whose next revision is cut off by it."""
        cut_off = [number for number, following in enumerate(self.next_revisions) if is_cut_off(following)]
        for number in cut_off:
            last, self.next_revisions[number] = self.next_revisions[number] - 1, start_revision
            logger.info("watch of %s: %s after revision %d; reading again", self.keys[number], reason, last)
        if cut_off:
            self._tell(self._on_gap)

    def _tell(self, callback: Callable[[], None]) -> None:
        with self._telling:
            if self.closed:
                return
            try:
                callback()
            except Exception:  # the thread must go on: the next change may be the one that ends the round
                logger.exception("watch of %s: a callback failed", ", ".join(self.keys))


class Watches:
    """The watches of a store, and while there are any, their thread.

    `borrow` lends a connection; `timeout_seconds` is for the server to confirm a new watch.
    """

    def __init__(self, borrow: Callable[[], AbstractContextManager[Watcher]], timeout_seconds: float) -> None:
        self._borrow = borrow
        self.timeout_seconds = timeout_seconds
        self._lock = threading.RLock()  # of all fields; held for moments
        self._watches: list[EtcdWatch] = []
        self._idle = threading.Event()  # there are none: the thread is to end
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None
        self._stream: Stream | None = None
        self._asked: collections.deque[_Place] = collections.deque()  # of the stream, and not confirmed
        self._places: dict[int, _Place] = {}  # what its ids stand for
        self._is_confirmed = False  # all that the stream was asked for at first

    def add(
        self,
        keys: Sequence[str],
        *,
        prefix: bool,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> EtcdWatch:
        """Raises: StoreUnavailableError when this host has no room for a thread now."""
        watch = EtcdWatch(self, keys, prefix, after_revision, on_events, on_gap)
        with self._lock:
            self._watches.append(watch)
            self._idle.clear()
            try:
                if self._stream is not None:
                    self._ask(self._stream, watch)
                elif self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="elasticd-watch", daemon=True)
                    start_thread(self._thread)
            except OSError as exc:
                if self._stream is None:
                    self._thread = None
                watch.close()
                raise StoreUnavailableError(f"{', '.join(keys)} cannot be watched: {exc}; see ulimit -u") from exc
        return watch

    def drop(self, watch: EtcdWatch) -> None:
        """Nobody is to be told for it any more. Idempotent."""
        with self._lock:
            if watch not in self._watches:
                return
            self._watches.remove(watch)
            for watch_id in [watch_id for watch_id, place in self._places.items() if place.watch is watch]:
                del self._places[watch_id]
                if self._stream is not None:
                    self._stream.release(watch_id)
            if not self._watches:
                self._idle.set()
                if self._stream is not None:
                    self._stream.cancel()
                    self._stream = None  # it was us, and the connection is good

    def close(self) -> None:
        """Close all of them and wait for the thread, unless it is the one that calls. Idempotent."""
        for watch in list(self._watches):
            watch.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.timeout_seconds)

    # The thread.

    def _run(self) -> None:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ElasticError),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=_LONGEST_PAUSE_SECONDS),
            stop=tenacity.stop_when_event_set(self._idle),
            sleep=tenacity.sleep_using_event(self._idle),
            before_sleep=self._complain,
        )
        while not self._ends():
            with contextlib.suppress(tenacity.RetryError):
                retrying(self._follow)
            # Also where a server confirms each watch and ends it at once there is a pause.
            self._idle.wait(random.uniform(0.02, 0.1))

    def _ends(self) -> bool:
        with self._lock:
            if not self._watches:
                self._thread = None
            return not self._watches

    def _follow(self) -> None:
        """One stream. Returns when another one is due; raises when it was never confirmed: pauses grow then."""
        self._is_confirmed = False
        try:
            with self._borrow() as connection:
                self._read(connection.watch())
        except ElasticError:
            if not self._is_confirmed and not self._idle.is_set():
                raise
        except RuntimeError as exc:  # a stream has threads of its own, and a host may have no room for one now
            raise StoreUnavailableError(f"{self._names()} cannot be watched: {exc}; see ulimit -u") from exc
        except Exception as exc:  # the top of a thread that no watch can do without
            logger.exception("watch of %s: a mistake of ours", self._names())
            raise StoreUnavailableError(f"{self._names()} cannot be watched: {exc!r}") from exc

    def _read(self, stream: Stream) -> None:
        try:
            if not self._begin(stream):
                return
            for batch in stream:
                if self._stream is not stream or not self._take(stream, batch):
                    return
            raise StoreUnavailableError(f"the watch of {self._names()} ended")
        except StoreUnavailableError:
            if self._stream is stream:
                raise
        except OSError as exc:
            raise StoreUnavailableError(f"{self._names()} cannot be watched: {exc}; see ulimit -u") from exc
        finally:
            with self._lock:
                self._stream = None
                self._cancel_timer()
            stream.cancel()

    def _begin(self, stream: Stream) -> bool:
        """Ask for all that is to be watched; returns whether that is anything. Raises: OSError, as `start_thread`."""
        with self._lock:
            self._stream = stream
            self._asked.clear()
            self._places.clear()
            for watch in self._watches:
                self._ask(stream, watch)
            return bool(self._watches)

    def _take(self, stream: Stream, batch: Batch) -> bool:
        """Whether the stream goes on after this."""
        place = self._confirm(stream, batch.watch_id) if batch.created else self._places.get(batch.watch_id)
        if place is None:  # dropped meanwhile
            return True
        key, following = place.watch.keys[place.number], place.watch.next_revisions[place.number]
        if start := batch.compacted and batch.compacted + 1:
            return self._gap(start, "its history was compacted", lambda revision: revision < start)
        if batch.cancelled:
            raise StoreUnavailableError(f"the watch of {key} was cancelled: {batch.cancelled}")
        if batch.created:
            if (start := batch.revision + 1) < following:
                reason = f"the store has gone back to revision {batch.revision}"
                return self._gap(start, reason, lambda revision: revision > start)
        elif batch.events:
            place.watch.take(place.number, batch.events)
        else:
            place.watch.next_revisions[place.number] = max(following, batch.revision + 1)
        return True

    def _confirm(self, stream: Stream, watch_id: int) -> _Place | None:
        """The first place that waits for it; None: its watch was dropped meanwhile."""
        with self._lock:
            if not self._asked:
                return None
            place = self._asked.popleft()
            if not self._asked:
                self._is_confirmed = True
                self._cancel_timer()
            if place.watch.closed:
                stream.release(watch_id)
                return None
            self._places[watch_id] = place
            return place

    def _gap(self, start_revision: int, reason: str, is_cut_off: Callable[[int], bool]) -> bool:
        """Have all of them that miss something go on from `start_revision`, on another stream."""
        for watch in list(self._watches):
            watch.go_on_from(start_revision, reason, is_cut_off)
        return False

    def _names(self) -> str:
        return ", ".join(key for watch in list(self._watches)[:2] for key in watch.keys)

    def _complain(self, state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            logger.warning("watch of %s is down, trying again: %s", self._names(), state.outcome.exception())

    # A frozen server says nothing at all. The lock is held.

    def _ask(self, stream: Stream, watch: EtcdWatch) -> None:
        now = time.monotonic()
        for number, key in enumerate(watch.keys):
            self._asked.append(_Place(watch, number, now))
            stream.request(key, watch.prefix, watch.next_revisions[number])
        if self._timer is None:
            self._arm(self.timeout_seconds)

    def _arm(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._look)
        timer.daemon = True
        start_thread(timer)
        self._timer = timer

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """The timer's: end a stream that has not confirmed a watch in time."""
        with self._lock:
            self._timer = None
            if self._stream is None or not self._asked:
                return
            left = self._asked[0].asked_at + self.timeout_seconds - time.monotonic()
            if left <= 0:
                self._stream.cancel()
                return
            try:
                self._arm(left)
            except OSError:
                self._stream.cancel()  # nobody could look again
