"""What the agent tells systemd (sd_notify(3)) and what it is told by it. Silent where there is no systemd.

READY once workers train or the node waits for others; STATUS a line for people; WATCHDOG after each finished pass of
the agent's loop and never otherwise; longer timeouts while a join or a drain is under way and within its own limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import MutableMapping
from pathlib import Path

from elastic.agent.view import headline
from elastic.errors import ExitCode
from elastic.status import JobStatus

logger = logging.getLogger(__name__)

FINAL = frozenset({ExitCode.SUCCEEDED, ExitCode.FAILED, ExitCode.USAGE, ExitCode.DO_NOT_RETRY, ExitCode.DRAINED})

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_READY_STATES = ("running", "waiting", "spare", "closed")
_PATIENCE_SECONDS = 30.0  # granted anew with each pass: an agent that stands still gets no more
_LAST_PATIENCE_SECONDS = 60.0  # to take everything down after the loop's end; the store may be away
_SHOWN_CHARACTERS = 1000
_MARKER = "running"


class Notifier:
    """Sends each state once, and the watchdog's keep-alive only when the caller has finished a pass of its loop."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes the variables out of `environ`: no worker may speak for the agent."""
        address, pid, usec = (environ.pop(name, "") for name in _VARIABLES)
        self.is_listened_to = bool(address)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_ours = usec.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_seconds = int(usec) / 1e6 if is_ours else 0.0
        self._sent: dict[str, str] = {}
        self._has_complained = False

    def passed(self, status: JobStatus, *, stopping: bool) -> None:
        """One finished pass of the loop; `stopping`: somebody has asked the agent to end."""
        if self.watchdog_seconds:
            self._send("WATCHDOG=1")
        if status.state in _READY_STATES:
            self.state(READY="1")
        if stopping or "READY" not in self._sent:
            self._wait_for(_PATIENCE_SECONDS)
        self.state(STATUS=headline(status)[:_SHOWN_CHARACTERS])

    def starting(self) -> None:
        """The loop has not begun yet: something is waited for, within limits of its own."""
        self._wait_for(_PATIENCE_SECONDS)

    def saving(self) -> None:
        """The loop is over, and what only memory holds is being saved, within limits of its own."""
        self.state(STATUS="saving what only memory holds")
        self._wait_for(_LAST_PATIENCE_SECONDS)
        if self.watchdog_seconds:
            self._send("WATCHDOG=1")

    def ending(self, exit_code: ExitCode | None) -> None:
        """The loop is over. Who ends well without ever having been ready would count as failed."""
        if exit_code in (ExitCode.SUCCEEDED, ExitCode.DRAINED):
            self.state(READY="1")
        self.state(STOPPING="1")
        self._wait_for(_LAST_PATIENCE_SECONDS)
        if self.watchdog_seconds:  # there are no more passes to be fed by
            self._send(f"WATCHDOG_USEC={_LAST_PATIENCE_SECONDS * 1e6:.0f}\nWATCHDOG=1")

    def state(self, **fields: str) -> None:
        """Tell what changed, for instance `state(READY="1", STATUS="round 3, 8 ranks")`."""
        news = {name: value for name, value in fields.items() if self._sent.get(name) != value}
        lines = (f"{name}={' '.join(value.split())}" for name, value in news.items())
        if news and self._send("\n".join(lines)):
            self._sent.update(news)

    def _wait_for(self, seconds: float) -> None:
        """Whatever timeout runs now ends in so many seconds at the earliest."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")

    def _send(self, message: str) -> bool:
        """Whether systemd has it; what has changed is told again otherwise."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(errors="replace"), self._address)
        except BlockingIOError:  # it has many services to listen to
            return False
        except OSError as exc:
            if not self._has_complained:
                logger.warning("cannot tell systemd %s: %s", message.splitlines()[0], exc)
                self._has_complained = True
            return False
        return True


class Life:
    """From a start to the next start by an operator, through any number of restarts by systemd.

    A file in the unit's RUNTIME_DIRECTORY, which `RuntimeDirectoryPreserve=restart` keeps from one to the next; it goes
    with an end that systemd takes for final.
    """

    def __init__(self, runtime: Path, *, supervised: bool) -> None:
        self._marker = runtime / _MARKER if supervised else None
        self.restarted = self._marker is not None and self._marker.exists()
        if self._marker is not None:
            with contextlib.suppress(OSError):  # on a full disk it is there all the same, and empty
                self._marker.write_text(f"{time.time():.0f}\n")

    def not_begun(self, exit_code: ExitCode) -> None:
        """The agent's loop was not reached: what systemd restarts then is as much an operator's start as this was."""
        if self._marker is not None and (exit_code in FINAL or not self.restarted):
            self._marker.unlink(missing_ok=True)

    def end(self, exit_code: ExitCode) -> None:
        if self._marker is not None and exit_code in FINAL:
            self._marker.unlink(missing_ok=True)
