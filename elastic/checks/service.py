"""The systemd unit of the job, where one is installed: systemd must wait for longer than the job may drain."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator

from elastic.checks.finding import Finding, error, ok

_ASK_SECONDS = 5.0
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_MARGIN_SECONDS = 5.0  # to kill who does not listen, and to say goodbye


def unit_of(job_name: str) -> str:
    """The instance for /etc/elasticd/<job_name>.toml."""
    return f"elasticd@{job_name}.service"


def stop_timeout(unit: str) -> float | None:
    """TimeoutStopSec of a unit; None where systemd does not run or does not know the unit."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return None
    command = [systemctl, "show", unit, "--property=LoadState,TimeoutStopUSec"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    fields = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return span_seconds(fields["TimeoutStopUSec"]) if fields.get("LoadState") == "loaded" else None


def check_stop_timeout(unit: str, timeout_seconds: float | None, grace_seconds: float) -> Iterator[Finding]:
    """systemd kills what is left after its own timeout: a drain that is still saving would lose steps."""
    if timeout_seconds is None:
        yield ok("unit", f"{unit} is not installed here")
        return
    shown = "infinity" if math.isinf(timeout_seconds) else f"{timeout_seconds:g} s"
    message = f"{unit}: TimeoutStopSec is {shown}, --drain-grace {grace_seconds:g} s"
    if timeout_seconds < grace_seconds + _MARGIN_SECONDS:
        need = math.ceil(grace_seconds + _MARGIN_SECONDS)
        remedy = f"systemctl edit {unit}: TimeoutStopSec={need} or more; or a shorter --drain-grace"
        yield error("unit", f"{message}: systemd would kill a drain", remedy)
    else:
        yield ok("unit", message)


def span_seconds(text: str) -> float:
    """`2min 30s` as systemd writes it. Raises: ValueError."""
    if text == "infinity":
        return math.inf
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    if not parts or any(unit not in _UNITS for _, unit in parts):
        raise ValueError(f"not a time as systemd writes it: {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
