"""What a check has found, and how checks are run so that one that breaks or hangs never stops the others."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

State = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy` says what to do; it is empty where nothing is wrong."""

    check: str
    state: State
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def error(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "error", message, remedy)


Check = Callable[[], Iterable[Finding]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where this host's kernel tells of itself; tests have directories of their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")

    def read(self, path: str) -> str | None:
        """A file below /proc, without its line end; None where there is none or it cannot be read."""
        try:
            return (self.proc / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None


def examine(checks: Mapping[str, Check], *, timeout_seconds: float) -> list[Finding]:
    """All findings, in the order of the checks; each check gets this long at most."""
    return [finding for name, check in checks.items() for finding in _guarded(name, check, timeout_seconds)]


def _guarded(name: str, check: Check, timeout_seconds: float) -> list[Finding]:
    """What the check finds. A dead file server or name server holds a call for minutes, and nothing can interrupt it:
    so each check has a thread of its own, which is left behind when its time is over."""
    answers: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(list(check()))
        except Exception as exc:  # top of a thread
            logger.debug("check %s has failed", name, exc_info=exc)
            message = f"could not be looked at: {type(exc).__name__}: {exc}"
            answers.put([warning(name, message, "LOGLEVEL=DEBUG shows where it failed; please report it")])

    threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    try:
        return answers.get(timeout=timeout_seconds)
    except queue.Empty:
        message = f"no answer within {timeout_seconds:g} s: something that it asks hangs"
        return [error(name, message, "look for a file system, name server or driver that does not answer")]
