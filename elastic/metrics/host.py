"""What the kernel says of memory: of a process, of this host or its control group, and of folders in shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process, pages shared with others included; None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def memory_limit_bytes() -> int:
    """What all processes here may use together."""
    return min(_meminfo("MemTotal"), _cgroup_value("memory.max") or (1 << 63))


def memory_used_bytes() -> int:
    """What is in use of the limit, without what the kernel can drop."""
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and used is not None and limit < total:
        return max(0, used - _cgroup_stat("inactive_file"))
    return total - free


def folder_bytes(folders: Iterable[Path]) -> int:
    """What the files below these folders hold, as far as it is allocated."""
    total = 0
    for folder in folders:
        for directory, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):  # gone meanwhile
                    total += os.lstat(f"{directory}/{name}").st_blocks * 512
    return total


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_value(name: str) -> int | None:
    """Of this process's own control group (v2); None where there is no such limit."""
    try:
        text = (_cgroup() / name).read_text().strip()
        return int(text)
    except (OSError, ValueError):
        return None


def _cgroup_stat(name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_cgroup() / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return _CGROUP / line[3:].lstrip("/")
    return _CGROUP
