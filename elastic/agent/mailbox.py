"""The one place where the agent waits: woken by signals, ended processes and other threads, without polling."""

from __future__ import annotations

import collections
import dataclasses
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

_SIGNALS_OF_A_KIND = 2  # that wait to be taken: a second SIGTERM means something else than the first


@dataclasses.dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal came; its handler did nothing but put this here."""

    number: signal.Signals


@dataclasses.dataclass(frozen=True, slots=True)
class Readable:
    """A watched file descriptor became readable; for a pidfd that means its process has ended."""

    key: Any


class Mailbox:
    """Single reader (the agent's loop), any number of writers. Create and close it on the main thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._posted: collections.deque[Any] = collections.deque()
        self._ours, self._theirs = socket.socketpair()
        self._signals_in, self._signals_out = socket.socketpair()
        for end in (self._ours, self._theirs, self._signals_in, self._signals_out):
            end.setblocking(False)
        self._selector.register(self._ours, selectors.EVENT_READ, None)
        self._selector.register(self._signals_in, selectors.EVENT_READ, None)
        self._signals: dict[int, int] = {}  # number -> how many have come
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1
        self._closed = threading.Event()

    def take_signals(self, numbers: Iterable[signal.Signals]) -> None:
        """From now on these signals arrive as `SignalReceived`; the old handlers are put back by `close`."""
        self._previous_wakeup = signal.set_wakeup_fd(self._signals_out.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            self._previous_handlers[number] = signal.signal(number, self._take_signal)
            signal.siginterrupt(number, False)

    def _take_signal(self, number: int, _frame: object) -> None:
        """Runs on the loop's thread, which the wake-up descriptor has woken: that alone may be full in a storm."""
        self._signals[number] = min(self._signals.get(number, 0) + 1, _SIGNALS_OF_A_KIND)

    def watch(self, descriptor: int, key: Any) -> None:
        """Report `Readable(key)` each time `wait` finds `descriptor` readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, key)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def post(self, message: Any) -> None:
        """Hand a message to the loop; any thread, also after the loop has ended."""
        self._posted.append(message)
        self.wake()

    def wake(self) -> None:
        """Make `wait` return, with no message."""
        if not self._closed.is_set():
            try:
                self._theirs.send(b"\0")
            except (BlockingIOError, OSError):  # full: the loop is awake anyway; closed: nobody waits any more
                return

    def wait(self, deadline: float) -> list[Any]:
        """What arrived, in no particular order; empty once the monotonic `deadline` has passed."""
        events: list[Any] = []
        if not self._posted and not self._signals:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is self._ours:
                    _drain(self._ours)
                elif key.fileobj is self._signals_in:
                    _drain(self._signals_in)  # the handler has said which
                else:
                    events.append(Readable(key.data))
        signals, self._signals = self._signals, {}
        events += [SignalReceived(signal.Signals(number)) for number, count in signals.items() for _ in range(count)]
        while self._posted:
            events.append(self._posted.popleft())
        return events

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._previous_handlers:
            signal.set_wakeup_fd(self._previous_wakeup)
        self._selector.close()
        for end in (self._ours, self._theirs, self._signals_in, self._signals_out):
            end.close()


def _drain(end: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            chunk = end.recv(4096)
        except BlockingIOError:
            return received
        if not chunk:
            return received
        received += chunk


class Request:
    """A question from another thread, answered by the loop."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self._result: Future[Any] = Future()

    def serve(self) -> None:
        """Called by the loop. What goes wrong is the asker's."""
        try:
            self._result.set_result(self._answer())
        except Exception as exc:  # noqa: BLE001 - raised again by `result`
            self._result.set_exception(exc)

    def result(self, timeout_seconds: float) -> Any:
        """Raises: TimeoutError when the loop did not answer in time, and whatever the answer raises."""
        try:
            return self._result.result(timeout_seconds)
        except FutureTimeoutError:
            if self._result.done():
                raise
            raise TimeoutError(f"the agent's loop did not answer within {timeout_seconds} s") from None
