"""Keeps a node's account of goodput beside the checkpoints, so that it outlives the agent as they do.

Each agent of the same job and node id goes on with it. What lies between the last writing of an agent that was killed
and its successor counts as down; the time between a job that ended in an orderly way (succeeded, failed, drained) and
its next run is nobody's. Without a directory for checkpoints, or where they lie behind a URL, the account is that of
one agent alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import time
from pathlib import Path

from elastic.metrics.goodput import Account, Goodput
from elastic.metrics.measured import TIME_KINDS
from elastic.passing import start_thread
from elastic.runtime import closed_to_others

logger = logging.getLogger(__name__)
_SAVE_SECONDS = 30.0
_CLOSE_SECONDS = 2.0


class KeptGoodput:
    """The account and its file. It is written by a thread of its own: storage may be slow, and the loop must not be."""

    def __init__(self, path: Path | None, *, save_seconds: float = _SAVE_SECONDS) -> None:
        """What cannot be read begins anew. Raises: OSError when there is no room for a thread."""
        account, gap = (Account(), 0.0) if path is None else load(path, time.time())
        self.account = Goodput(account, down_seconds=gap)
        self._path, self._save_seconds = path, save_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-goodput", daemon=True)
        if path is not None:
            start_thread(self._thread)

    def close(self) -> None:
        """Write once more, without waiting for a directory that does not answer."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        path = self._path
        while path is not None:
            closing = self._closing.wait(self._save_seconds)
            save(path, self.account.whole, time.time(), is_closed=self.account.is_closed)
            if closing:
                return


def place(checkpoint_dir: str | None, run_id: str, node_id: str) -> Path | None:
    """Where a node keeps its account; None where it cannot."""
    if checkpoint_dir is None or "://" in checkpoint_dir:
        return None
    name = re.sub(r"[^\w.-]", "_", f"{run_id}-{node_id}")
    return Path(checkpoint_dir) / f".goodput-{name}.json"


def load(path: Path, unix_time: float) -> tuple[Account, float]:
    """The account so far, and the seconds since then that nobody has accounted for; empty where it cannot be read."""
    try:
        raw = json.loads(path.read_text())
        seconds = {kind: float(raw["seconds"].get(kind, 0.0)) for kind in TIME_KINDS}
        gap = 0.0 if raw["closed"] else unix_time - float(raw["unix_time"])
        if not all(math.isfinite(value) and value >= 0 for value in seconds.values()) or not math.isfinite(gap):
            raise ValueError("a number of seconds is none")
    except FileNotFoundError:
        return Account(), 0.0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        logger.warning("goodput begins anew: %s cannot be read: %s", path, exc)
        return Account(), 0.0
    return Account(seconds=seconds), max(0.0, gap)


def save(path: Path, account: Account, unix_time: float, *, is_closed: bool) -> None:
    """Write the account so that it is there whole or not at all; that it cannot be is no trouble for training."""
    text = json.dumps({"seconds": dict(account.seconds), "unix_time": unix_time, "closed": is_closed})
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", opener=closed_to_others) as file:
            file.write(text)
        temporary.replace(path)
    except OSError as exc:
        logger.debug("goodput is not kept: %s", exc)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
