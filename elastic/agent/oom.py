"""How often the kernel's OOM killer has struck: what tells a kill for memory from any other SIGKILL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_COUNTER = "oom_kill"


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Processes killed so far in this process's cgroup, which its workers share: whatever limit or host was full.

    Where that is not told, in the whole host since boot, strangers included; 0 where nothing is.
    """
    for path in (*_own_counters(proc, cgroups), proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith(f"{_COUNTER} "):
                    return int(line.split()[1])
    return 0


def _own_counters(proc: Path, cgroups: Path) -> Iterator[Path]:
    """cgroup v2 has memory.events, v1 memory.oom_control; in a container the mount may begin at the own cgroup."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, name = cgroups / "memory", "memory.oom_control"
            elif number == "0" and not controllers:
                root, name = cgroups, "memory.events"
            else:
                continue
            if ".." not in Path(path).parts:
                yield root / path.strip("/") / name
            if not (root / path.strip("/")).is_dir():
                yield root / name
