"""How long systemd waits for this unit to stop, compared with how long a drain may take."""

from __future__ import annotations

import logging
from pathlib import Path

from elastic.config import JobConfig
from elastic.systemctl import stop_seconds, stop_timeout

logger = logging.getLogger(__name__)


def warn_if_short(config: JobConfig, unit: str) -> None:
    """Say so where systemd may kill in the middle of a save. The agent asks for more time, but a frozen one cannot."""
    grace = config.stop_grace_seconds
    timeout = stop_timeout(unit) if unit else None
    if timeout is not None and timeout <= grace:
        name = "--drain-grace" if grace == config.drain_grace_seconds else "--shutdown-timeout"
        logger.warning(
            "TimeoutStopSec=%g s of %s is not longer than %s %g s: a stop may be killed in the middle of a save; "
            "set TimeoutStopSec=%d by `systemctl edit %s`, or run `elasticd install` again",
            timeout,
            unit,
            name,
            grace,
            stop_seconds(grace),
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
