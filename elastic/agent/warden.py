"""The warden: a small process beside the agent that kills everything of ours when the agent is gone or frozen.

It runs this file alone, with the standard library and without torch: `python -I -S warden.py NONCE`. On its standard
input it holds the end of a pipe from the agent, which sends lines:

    deadline SECONDS     CLOCK_BOOTTIME until when the workers may live; moved on after each finished pass of the loop
    groups PGID ...      process groups of the workers that live now
    bye                  the agent has stopped everything itself

Pipe closed without `bye`, or deadline over: SIGKILL to the groups, their descendants and everything that carries
the nonce in its environment, again and again until nothing is left. A deadline that passes does not end the warden: the
agent may thaw, and finds its workers gone.

The agent's job lock is inherited here, so that a new agent cannot start before the old one's workers are dead. That new
agent ends a warden which stands still itself (`instance.kill_what_it_left`); it knows it by `MARK`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ELASTICD_WARDEN"  # in its environment, with the nonce
_SWEEP_SECONDS = 10.0


class Warden:
    """The agent's handle on its warden."""

    def __init__(self, nonce: str, *, keep_open: tuple[int, ...] = ()) -> None:
        """`keep_open` are descriptors that the warden inherits and holds until it ends."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), nonce],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={MARK: nonce},
            pass_fds=keep_open,
            start_new_session=True,  # a signal to the agent's terminal or group must not reach it
            bufsize=0,
        )
        if self._process.stdin:
            os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def allow_until(self, boottime: float) -> None:
        """The workers may live until this CLOCK_BOOTTIME."""
        self._send(f"deadline {boottime:.3f}")

    def groups(self, pgids: list[int]) -> None:
        self._send("groups " + " ".join(map(str, pgids)))

    def close(self) -> None:
        """The agent has stopped everything: the warden only leaves."""
        try:
            self._send("bye")
        except BlockingIOError:
            self.kill()
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """For one that is stopped or stuck: its end is seen like any other."""
        self._process.kill()

    def _send(self, line: str) -> None:
        """Raises: BlockingIOError when it has not read for so long that the pipe is full."""
        if self._process.stdin and not self._process.stdin.closed:
            data = line.encode() + b"\n"
            try:
                if self._process.stdin.write(data) != len(data):
                    raise BlockingIOError("the warden does not read")
            except BrokenPipeError:  # it died; the agent's loop sees its end and starts another
                return


def boottime() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ours(nonce: str, *more: str) -> set[int]:
    """Processes that carry the nonce, and these variables, in the environment they were started with."""
    return carriers(f"ELASTICD_NONCE={nonce}", *more)


def carriers(*variables: str) -> set[int]:
    """Processes with all of these in the environment they were started with."""
    needles = [text.encode() for text in variables]
    found = set()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - a path object per process would double the cost
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as environ:  # noqa: PTH123
                    carried = environ.read().split(b"\0")
                    if all(needle in carried for needle in needles):
                        found.add(int(entry))
            except OSError:  # gone, or another user's
                continue
    return found


def descendants(roots: set[int]) -> set[int]:
    """The roots and everything below them now."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:  # noqa: PTH123
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found, queue = set(roots), list(roots)
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def kill_everything(
    nonce: str, pgids: list[int], *, deadline: float, below: int = 0, spare: frozenset[int] = frozenset()
) -> bool:
    """SIGKILL the groups, then whatever carries the nonce and its descendants, until two looks find nothing.

    With `below`, everything that descends from that process as well, but for `spare`. Returns False when something is
    still there at the monotonic `deadline` (a process in uninterruptible sleep).
    """
    kept = spare | {os.getpid()}
    doomed = descendants(set(pgids) | ours(nonce)) - kept
    for pgid in pgids:
        _kill(os.killpg, pgid)
    clean = 0
    while clean < 2 and time.monotonic() < deadline:
        found = doomed | ours(nonce) | (descendants({below}) if below else set())
        doomed = {pid for pid in found - kept if is_alive(pid)}
        for pid in doomed:
            _kill(os.kill, pid)
        clean = 0 if doomed else clean + 1
        if doomed:
            time.sleep(0.01)
    return clean >= 2


def is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _kill(how: object, target: int) -> None:
    try:
        how(target, signal.SIGKILL)  # type: ignore[operator]
    except (ProcessLookupError, PermissionError):
        return


def main(nonce: str) -> None:
    """Read lines until the agent says bye, closes the pipe, or lets a deadline pass."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    deadline: float | None = None
    pgids: list[int] = []
    pending = b""
    while True:
        timeout = None if deadline is None else max(0.0, deadline - boottime())
        # A suspended machine stops this timeout but not the deadline, so never sleep for long.
        ready, _, _ = select.select([0], [], [], None if timeout is None else min(timeout, 1.0))
        if ready:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                word, *values = line.decode().split()
                if word == "deadline":
                    deadline = float(values[0])
                elif word == "groups":
                    pgids = [int(value) for value in values]
                elif word == "bye":
                    return
        elif deadline is not None and boottime() >= deadline:
            kill_everything(nonce, pgids, deadline=time.monotonic() + _SWEEP_SECONDS)
            deadline, pgids = None, []
    kill_everything(nonce, pgids, deadline=time.monotonic() + _SWEEP_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
