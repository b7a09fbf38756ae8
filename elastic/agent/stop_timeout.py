"""How long systemd waits for this unit to stop, compared with how long a drain may take."""

from __future__ import annotations

import logging
import math
import re
import subprocess
from pathlib import Path

from elastic.config import JobConfig

logger = logging.getLogger(__name__)

_ASK_SECONDS = 5.0
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "month": 2629800.0}


def warn_if_short(config: JobConfig, unit: str) -> None:
    """Say so where systemd may kill in the middle of a save. The agent asks for more time, but a frozen one cannot."""
    grace = max(config.drain_grace_seconds, config.shutdown_timeout_seconds)
    timeout = _ask(unit) if unit else None
    if timeout is not None and timeout <= grace:
        name = "--drain-grace" if grace == config.drain_grace_seconds else "--shutdown-timeout"
        logger.warning(
            "TimeoutStopSec=%g s of %s is not longer than %s %g s: a stop may be killed in the middle of a save; "
            "set TimeoutStopSec=%d by `systemctl edit %s`, or run `elasticd install` again",
            timeout,
            unit,
            name,
            grace,
            math.ceil(grace) + 30,
            unit,
        )


def own_unit(cgroup: Path = Path("/proc/self/cgroup")) -> str:
    """The service that this process belongs to; empty: none."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):  # v2, or v1's hierarchy of systemd's own
            for part in reversed(path.split("/")):
                if part.endswith(".service"):
                    return part
    return ""


def parse_timespan(text: str) -> float | None:
    """Seconds of what `systemctl show` writes, such as "2min 30s" or "infinity"; None for anything else."""
    if text == "infinity":
        return math.inf
    parts = [re.fullmatch(r"([0-9.]+)(us|ms|s|min|h|d|w|month)", part) for part in text.split()]
    if not parts or any(part is None for part in parts):
        return None
    return sum(float(part[1]) * _UNITS[part[2]] for part in parts if part is not None)


def _ask(unit: str) -> float | None:
    command = ["systemctl", "show", "--value", "--property=TimeoutStopUSec", unit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_timespan(done.stdout.strip())
