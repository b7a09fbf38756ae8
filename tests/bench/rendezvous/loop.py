"""A few threads that do what is due for many simulated nodes; a thread or more for each would measure the threads."""

from __future__ import annotations

import collections
import heapq
import itertools
import threading
import time
from collections.abc import Callable

Act = Callable[[], float | None]  # does what is due; returns the monotonic time of the next call, None: when woken


class Loop:
    """Each act runs in one thread at a time, when it is woken or due, and again if it was woken meanwhile."""

    def __init__(self, threads: int) -> None:
        self._condition = threading.Condition()
        self._ready: collections.deque[_Item] = collections.deque()
        self._timed: list[tuple[float, int, _Item]] = []
        self._tickets = itertools.count()
        self.failures: list[BaseException] = []
        for number in range(threads):
            threading.Thread(target=self._run, name=f"loop-{number}", daemon=True).start()

    def add(self, act: Act) -> Callable[[], None]:
        """Returns what wakes it, to be called from any thread; nothing happens before."""
        item = _Item(act)
        return lambda: self._wake(item)

    def _wake(self, item: _Item) -> None:
        with self._condition:
            if item.is_running:
                item.is_woken = True
            elif not item.is_queued:
                self._queue(item)

    def _queue(self, item: _Item) -> None:
        item.is_queued, item.due = True, None
        self._ready.append(item)
        self._condition.notify()

    def _next(self) -> _Item:
        with self._condition:
            while True:
                now = time.monotonic()
                while self._timed and self._timed[0][0] <= now:
                    due, _, item = heapq.heappop(self._timed)
                    if item.due == due:  # else it has run since
                        self._queue(item)
                if self._ready:
                    break
                self._condition.wait(self._timed[0][0] - now if self._timed else None)
            item = self._ready.popleft()
            item.is_queued, item.is_woken, item.is_running = False, False, True
            return item

    def _done(self, item: _Item, due: float | None) -> None:
        with self._condition:
            item.is_running = False
            if item.is_woken:
                self._queue(item)
            elif due is not None:
                item.due = due
                heapq.heappush(self._timed, (due, next(self._tickets), item))
                self._condition.notify()

    def _run(self) -> None:
        while True:
            item, due = self._next(), None
            try:
                due = item.act()
            except Exception as exc:  # noqa: BLE001  the top of a thread: told by `failures`
                self.failures.append(exc)
            self._done(item, due)


class _Item:
    """An act and where it stands."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.due: float | None = None
        self.is_queued = self.is_running = self.is_woken = False
