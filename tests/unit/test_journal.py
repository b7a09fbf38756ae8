"""The lines of the log: with the time for people, with a priority and without a second time for the journal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

LOG = """
import logging, os
from elastic.journal import log_to_stderr
log_to_stderr(os.environ)
logger = logging.getLogger("elastic.x")
logger.info("one")
logger.error("two\\nthree")
"""


def lines(stderr: int, environ: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", LOG], env={**os.environ, **environ}, stderr=stderr, timeout=30, check=True)


def test_lines_in_the_journal_carry_a_priority_each_and_no_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = os.fstat(theirs.fileno())
        lines(theirs.fileno(), {"JOURNAL_STREAM": f"{stream.st_dev}:{stream.st_ino}"})
        assert ours.recv(4096) == b"<6>elastic.x: one\n<3>elastic.x: two\n<3>three\n"


def test_a_stream_that_is_not_the_journals_has_times(tmp_path: Path) -> None:
    """The variable is inherited by who has redirected its output."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        lines(file.fileno(), {"JOURNAL_STREAM": "1:1"})
    assert "INFO elastic.x: one" in log.read_text()
    assert "<6>" not in log.read_text()
