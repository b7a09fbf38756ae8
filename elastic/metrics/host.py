"""What the kernel says of memory: of a process, of this host or its control group, and of folders in shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """Of the files of a control group."""

    limit: str
    used: str
    droppable: str  # in memory.stat: the page cache that goes first


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process, pages shared with others included; None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def memory_limit_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What all processes here may use together."""
    folder, names = _own_group(proc, cgroups)
    return min(_meminfo(proc, "MemTotal"), _value(folder / names.limit) or (1 << 63))


def memory_used_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What is in use of the limit, without what the kernel can drop."""
    total, free = _meminfo(proc, "MemTotal"), _meminfo(proc, "MemAvailable")
    folder, names = _own_group(proc, cgroups)
    limit, used = _value(folder / names.limit), _value(folder / names.used)
    if limit is not None and used is not None and limit < total:
        return max(0, used - _stat(folder, names.droppable))
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


def _meminfo(proc: Path, name: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _value(path: Path) -> int | None:
    """None where there is no such limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(folder: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _own_group(proc: Path, cgroups: Path) -> tuple[Path, _Names]:
    """This process's own; v1 has a tree for memory alone. In a container the mount may begin at the own group."""
    root, names, own = cgroups, _V2, ""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names, own = cgroups / "memory", _V1, path
            break
        if number == "0":
            own = path
    folder = root / own.lstrip("/")
    return (folder if folder.is_dir() and ".." not in folder.parts else root), names
