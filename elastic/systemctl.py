"""A job's unit: its name, how long it must be given to stop, and what the service manager of this host says of it."""

from __future__ import annotations

import math
import re
import subprocess

_ASK_SECONDS = 5.0
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "month": 2629800.0}
_MARGIN_SECONDS = 30  # after the grace: to kill who does not listen, to leave the store, to take everything down


def unit_of(job_name: str) -> str:
    """The instance for /etc/elasticd/<job_name>.toml."""
    return f"elasticd@{job_name}.service"


def stop_seconds(grace_seconds: float) -> int:
    """How long systemd is to wait for a stop: longer than anything that the agent itself waits for."""
    return math.ceil(grace_seconds) + _MARGIN_SECONDS


def stop_timeout(unit: str) -> float | None:
    """TimeoutStopSec of a unit; None where systemd does not run or does not know the unit."""
    command = ["systemctl", "show", "--property=LoadState,TimeoutStopUSec", unit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return parse_timespan(fields.get("TimeoutStopUSec", "")) if fields.get("LoadState") == "loaded" else None


def parse_timespan(text: str) -> float | None:
    """Seconds of what `systemctl show` writes, such as "2min 30s" or "infinity"; None for anything else."""
    if text == "infinity":
        return math.inf
    parts = [re.fullmatch(r"([0-9.]+)(us|ms|s|min|h|d|w|month)", part) for part in text.split()]
    if not parts or any(part is None for part in parts):
        return None
    return sum(float(part[1]) * _UNITS[part[2]] for part in parts if part is not None)
