"""What kernel and control group allow this user: descriptors, locked memory, processes, memory; the OOM rules."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from elastic.checks.finding import Finding, Host, error, ok, warning
from elastic.status import plural

Limit = tuple[int, int]  # soft, hard; RLIM_INFINITY is -1
_WORKER_BYTES = 400 << 20  # resident, before any model: torch, its libraries and one process group
_THREADS_PER_WORKER = 200  # of torch, gloo or NCCL, data loaders
_OWN_DESCRIPTORS = 256


def check_descriptors(limit: Limit, world_size: int) -> Iterator[Finding]:
    """The store's host holds two connections of every worker of the job, and gloo connects each with each."""
    soft, hard = limit
    need = _OWN_DESCRIPTORS + 4 * world_size
    message = f"{_shown(soft)} open files allowed; about {need} are needed for {plural(world_size, 'worker')}"
    if hard != resource.RLIM_INFINITY and hard < need:
        yield error("descriptors", message, f"LimitNOFILE={2 * need} in the unit, or ulimit -n as root")
    elif soft != resource.RLIM_INFINITY and soft < need:
        yield warning("descriptors", message, f"LimitNOFILE={2 * need} in the unit, or ulimit -n {2 * need}")
    else:
        yield ok("descriptors", f"{_shown(soft)} open files allowed")


def check_memlock(limit: Limit, host: Host) -> Iterator[Finding]:
    """RDMA registers memory, which counts as locked."""
    devices = sorted(path.name for path in (host.sys / "class/infiniband").glob("*"))
    soft = limit[0]
    if not devices:
        yield ok("memlock", f"{_shown(soft)} bytes may be locked; no RDMA device needs more")
    elif soft != resource.RLIM_INFINITY:
        message = f"{soft} bytes may be locked, and RDMA ({', '.join(devices)}) locks what it sends"
        yield error("memlock", message, "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")
    else:
        yield ok("memlock", f"unlimited, for {', '.join(devices)}")


def check_memory(host: Host, processes: int) -> Iterator[Finding]:
    """What the control group, or the host, lets all processes here have together."""
    total = _meminfo(host, "MemTotal")
    limit, where = _smallest(host, "memory.max")
    allowed = min(total, limit) if limit is not None else total
    need = processes * _WORKER_BYTES
    of = f"of control group {where}" if limit is not None and limit < total else "of this host"
    message = (
        f"{allowed / 1e9:.1f} GB {of}; agent, workers and standbys ({processes} processes) take about "
        f"{need / 1e9:.1f} GB without a model"
    )
    if allowed < need:
        remedy = "raise MemoryMax= or --memory" if "group" in of else "--no-standby, or fewer workers"
        yield error("memory", message, remedy)
    else:
        yield ok("memory", message)


def check_pids(host: Host, processes: int) -> Iterator[Finding]:
    """Threads count."""
    limit, where = _smallest(host, "pids.max")
    if limit is None:
        yield ok("pids", "the control group does not bound the number of processes and threads")
        return
    need = processes * _THREADS_PER_WORKER
    message = f"{limit} processes and threads in control group {where}; about {need} may be needed"
    if limit < need:
        yield warning("pids", message, f"TasksMax={2 * need} in the unit, or --pids-limit {2 * need}")
    else:
        yield ok("pids", message)


def check_oom(host: Host) -> Iterator[Finding]:
    """What the kernel does when memory is short."""
    if host.read("sys/vm/panic_on_oom") not in ("0", None):
        message = "vm.panic_on_oom is set: one worker out of memory takes the host down"
        yield warning("oom", message, "sysctl vm.panic_on_oom=0")
    if host.read("sys/vm/overcommit_memory") == "2":
        message = "vm.overcommit_memory is 2: CUDA and torch reserve much more than they use, and are refused it"
        yield warning("oom", message, "sysctl vm.overcommit_memory=0")
    if host.read("sys/vm/oom_kill_allocating_task") not in ("0", None):
        message = "vm.oom_kill_allocating_task is set: the agent may be killed for what a worker takes"
        yield warning("oom", message, "sysctl vm.oom_kill_allocating_task=0")
    if host.read("sys/vm/panic_on_oom") is not None:
        yield ok("oom", "the kernel kills the largest process when memory is short")


def own_limits() -> tuple[Limit, Limit]:
    """Open files and locked memory of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)


def _smallest(host: Host, name: str) -> tuple[int | None, str]:
    """A limit of this process's control group or one above it, whichever is tightest, and where it stands."""
    found: tuple[int | None, str] = (None, "")
    root = host.sys / "fs/cgroup"
    path = _cgroup(host, root)
    while path.is_relative_to(root):
        value = _number(path / name)
        if value is not None and (found[0] is None or value < found[0]):
            found = (value, f"/{path.relative_to(root)}".replace("/.", "/"))
        path = path.parent
    return found


def _cgroup(host: Host, root: Path) -> Path:
    for line in (host.read("self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            return root / line[3:].lstrip("/").replace("../", "")
    return root


def _number(path: Path) -> int | None:
    """None where the file says max, or is not there."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _meminfo(host: Host, name: str) -> int:
    for line in (host.read("meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _shown(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
