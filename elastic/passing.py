"""Conditions of a host that pass by themselves, told from those that somebody has to mend: the first are waited out."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_AWAY = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ETIME),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


def is_away(error: OSError) -> bool:
    """Whether it says that a file server does not answer now, rather than what is there."""
    return error.errno in _AWAY or isinstance(error, (TimeoutError, ConnectionError))


def lacks_room(error: OSError, *, port: int | None = None) -> bool:
    """Whether this host has no room now: no thread, no descriptor, no memory.

    `port`: that was asked for; with 0, which is any, it may be that none is left.
    """
    return error.errno in _NO_ROOM or (port == 0 and error.errno == errno.EADDRINUSE)


def is_full(error: OSError) -> bool:
    """Whether it says that a disk has no room, or this user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def start_thread(thread: threading.Thread) -> None:
    """Raises: OSError (EAGAIN) when this host has no room for a thread, which Python says by a RuntimeError."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise OSError(errno.EAGAIN, f"{os.strerror(errno.EAGAIN)} ({exc})") from exc


def begin(act: Callable[[], T], name: str, ended: Callable[[], None] = lambda: None) -> Future[T]:
    """`act` on a thread that may be left behind: a file server, or a frozen host, may never answer.

    Raises: OSError (EAGAIN) when this host has no room for a thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except Exception as exc:  # noqa: BLE001 - the top of a thread; raised again by result()
            outcome.set_exception(exc)
        ended()

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    return outcome
