"""What workers leave behind: found below this process, which adopts orphans, and by the variables they carry.

The warden's search (`warden.kill_everything`) reads all of /proc several times, which takes the longer the more runs on
the host; these are made for the way of a recovery, where each millisecond counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from elastic.agent.warden import MARK, descendants, is_alive, ours

_MARKS = (b"ELASTICD_NONCE=", f"{MARK}=".encode())
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.01


def kill_below(spare: frozenset[int], *, deadline: float) -> bool:
    """SIGKILL everything below this process but `spare` and what is below that, until two looks find nothing.

    Returns False when something is still there at the monotonic `deadline` (a process in uninterruptible sleep).
    """
    clean, pause = 0, _FIRST_PAUSE_SECONDS
    while clean < 2 and time.monotonic() < deadline:
        doomed = [pid for pid in below(spare) if is_alive(pid)]
        for pid in doomed:
            _kill(pid)
        clean = 0 if doomed else clean + 1
        if doomed:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return clean >= 2


def kill_round(nonce: str, number: int) -> None:
    """SIGKILL what carries the variables of this agent's round and is not below us: started for it by somebody else.

    Workers that have been standbys do not carry a round's number, but all that they start does.
    """
    for pid in ours(nonce, f"ELASTICD_ROUND={number}"):
        _kill(pid)


def below(spare: frozenset[int]) -> set[int]:
    """The living descendants of this process, without `spare` and theirs."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # noqa: PTH110 - a kernel without it
        return descendants({os.getpid()}) - descendants(set(spare)) - {os.getpid()}
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        children = _children(queue.pop()) - spare - found
        found |= children
        queue += children
    return found


def holders(descriptor: int) -> list[int]:
    """Workers and wardens, of whatever agent, that hold this lock; who has the file open to wait for it does not."""
    path, found = os.readlink(f"/proc/self/fd/{descriptor}"), []  # noqa: PTH115
    for entry in os.listdir("/proc"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if not entry.isdigit() or not any(mark in Path(f"/proc/{entry}/environ").read_bytes() for mark in _MARKS):
                continue
            numbers = os.listdir(f"/proc/{entry}/fd")  # noqa: PTH208
            if any(os.readlink(f"/proc/{entry}/fd/{number}") == path for number in numbers):  # noqa: PTH115
                found.append(int(entry))
    return sorted(found)


def is_being_killed(pid: int) -> bool:
    """Whether SIGKILL is on its way to a process that does not end: it sleeps in the kernel, and may for long."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) >> (signal.SIGKILL - 1) & 1:
                return True
    return False


def _children(pid: int) -> set[int]:
    """Of all its threads."""
    children: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - in the way of a recovery
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                children.update(map(int, file.read().split()))
    return children


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
