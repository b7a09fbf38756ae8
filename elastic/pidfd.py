"""Descriptors of processes, also where Python or the kernel has none.

An interpreter that was built against old headers lacks `os.pidfd_open` (uv's until 2026): the kernel is asked past it.
Kernels before 5.3 lack it, and containers may forbid it: there, a thread waits for the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import threading
from typing import Any

from elastic.passing import start_thread

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the same number on every architecture that torch runs on
_NONE_HERE = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENODEV})
_LIBC: Any = ctypes.CDLL(None, use_errno=True)


def open_pidfd(pid: int) -> int | None:
    """A pidfd, close-on-exec; None where there are none. Raises: OSError, such as ProcessLookupError."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _syscall(_PIDFD_OPEN, pid, 0)
    except OSError as exc:
        if exc.errno in _NONE_HERE:
            return None
        raise


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """To the process that was meant when the pidfd was opened. Raises: OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _syscall(_PIDFD_SEND_SIGNAL, pidfd, int(number), None, 0)


def end_of_child(pid: int) -> int:
    """A descriptor that becomes readable when this child has ended; it is not reaped. The caller closes it.

    Raises: OSError, also when there is no room for a thread.
    """
    pidfd = open_pidfd(pid)
    if pidfd is not None:
        return pidfd
    reading, writing = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # somebody has taken its exit code already
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writing)

    try:
        start_thread(threading.Thread(target=wait, name=f"end-of-{pid}", daemon=True))
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    return reading


def _syscall(*arguments: int | None) -> int:
    result: int = _LIBC.syscall(*(None if value is None else ctypes.c_long(value) for value in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
