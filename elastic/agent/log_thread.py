"""The agent's log lines go through a thread of their own: a reader that has stopped reading must not stop the loop.

A full pipe, a terminal held by ^S or a stuck collector would otherwise block the agent in a write, and its warden would
then kill workers that are well. Lines that do not fit into the queue are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler

from elastic.passing import start_thread

LOG_THREAD = "elasticd-log"
_LINES = 10_000
_FLUSH_SECONDS = 2.0
_LOGGERS = ("elastic", "checkpoints")


class _Dropping(QueueHandler):
    """Never waits."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


@contextlib.contextmanager
def log_thread() -> Iterator[None]:
    """While the block runs, a thread serves our loggers' handlers; what is left is written at the end, if it can be.

    Raises: OSError when there is no room for a thread.
    """
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_LINES)
    front = _Dropping(lines)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = {logger: list(logger.handlers) for logger in loggers}
    handlers = list(dict.fromkeys(handler for found in before.values() for handler in found))
    thread = threading.Thread(target=_serve, args=(lines, handlers), name=LOG_THREAD, daemon=True)
    start_thread(thread)
    for logger in loggers:
        if before[logger]:
            logger.handlers = [front]
    try:
        yield
    finally:
        for logger, found in before.items():
            logger.handlers = found
        with contextlib.suppress(queue.Full):
            lines.put(None, timeout=_FLUSH_SECONDS)
        thread.join(_FLUSH_SECONDS)


def _serve(lines: queue.Queue[logging.LogRecord | None], handlers: list[logging.Handler]) -> None:
    while (record := lines.get()) is not None:
        for handler in handlers:
            handler.handle(record)
