"""What the agent tells systemd (sd_notify(3)): READY, STATUS, WATCHDOG, STOPPING. Silent when there is no systemd."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """Sends each state once, and the watchdog's keep-alive only when the caller has finished a pass of its loop."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        watchdog_pid = environ.get("WATCHDOG_PID", str(os.getpid()))
        usec = environ.get("WATCHDOG_USEC", "0") if watchdog_pid == str(os.getpid()) else "0"
        self.watchdog_seconds = int(usec) / 1e6 if usec.isdigit() else 0.0
        self._sent: dict[str, str] = {}

    def state(self, **fields: str) -> None:
        """Tell what changed, for instance `state(READY="1", STATUS="round 3, 8 ranks")`."""
        news = {name: value for name, value in fields.items() if self._sent.get(name) != value}
        if news:
            self._sent.update(news)
            self._send("\n".join(f"{name}={value}" for name, value in news.items()))

    def alive(self) -> None:
        """One finished pass of the loop."""
        if self.watchdog_seconds:
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), address)
        except OSError as exc:
            logger.warning("cannot tell systemd %s: %s", message.splitlines()[0], exc)
