"""Log lines on stderr: with the time for people, with a priority and without a second time for systemd's journal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

_PACKAGES = ("elastic", "checkpoints")
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))  # sd-daemon(3), syslog(3)


def log_to_stderr(environ: Mapping[str, str] = os.environ) -> None:
    """Our own lines at INFO or $LOGLEVEL; other packages' warnings stay as they are."""
    handler = stderr_handler(environ)
    level = logging.getLevelName(environ.get("LOGLEVEL", "INFO").upper())
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level if isinstance(level, int) else logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False


def name_own_warnings(environ: Mapping[str, str] = os.environ) -> None:
    """In a program that has not set up logging, Python writes warnings as bare text: ours get time, level and name."""
    last = logging.lastResort
    if last is not None and last.formatter is None:
        last.setFormatter(_OwnLines(stderr_handler(environ).formatter or logging.Formatter()))


class _OwnLines(logging.Formatter):
    """`ours` for the lines of our own packages; all others as they are."""

    def __init__(self, ours: logging.Formatter) -> None:
        super().__init__()
        self._ours = ours

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name.partition(".")[0] in _PACKAGES
        return self._ours.format(record) if is_ours else super().format(record)


def stderr_handler(environ: Mapping[str, str] = os.environ) -> logging.Handler:
    """Writes lines as whoever reads stderr wants them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JournalFormatter("%(name)s: %(message)s")
        if is_journal(environ)
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    return handler


def is_journal(environ: Mapping[str, str]) -> bool:
    """Whether stderr is the very stream that systemd has connected to the journal (systemd.exec(5), JOURNAL_STREAM)."""
    stream = environ.get("JOURNAL_STREAM")
    if not stream:
        return False
    try:
        found = os.fstat(2)
    except OSError:  # closed
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


class JournalFormatter(logging.Formatter):
    """Each line with its priority, also those of a traceback; the journal knows the time itself."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = priority(record)
        return "\n".join(f"{prefix}{line}" for line in super().format(record).splitlines())


def priority(record: logging.LogRecord) -> str:
    """What the journal takes from the beginning of a line."""
    return f"<{next(number for level, number in _PRIORITIES if record.levelno >= level)}>"
