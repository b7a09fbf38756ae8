"""The systemd unit of the job, where one is installed: systemd must wait for longer than the job may drain."""

from __future__ import annotations

import math
from collections.abc import Iterator

from elastic.checks.finding import Finding, error, ok
from elastic.systemctl import stop_seconds


def check_stop_timeout(unit: str, timeout_seconds: float | None, grace_seconds: float) -> Iterator[Finding]:
    """systemd kills what is left after its own timeout: a drain that is still saving would lose steps."""
    if timeout_seconds is None:
        yield ok("unit", f"{unit} is not installed here")
        return
    shown = "infinity" if math.isinf(timeout_seconds) else f"{timeout_seconds:g} s"
    message = f"{unit}: TimeoutStopSec is {shown}, a drain may take {grace_seconds:g} s"
    if timeout_seconds <= grace_seconds:
        need = stop_seconds(grace_seconds)
        remedy = f"systemctl edit {unit}: TimeoutStopSec={need}; or a shorter --drain-grace, --shutdown-timeout"
        yield error("unit", f"{message}: systemd would kill a drain", remedy)
    else:
        yield ok("unit", message)
