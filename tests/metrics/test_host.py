"""What the kernel says of memory, with control groups of either version."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.metrics.host import memory_limit_bytes, memory_used_bytes

MEMINFO = "MemTotal:       8000 kB\nMemFree:        100 kB\nMemAvailable:   6000 kB\n"
V1 = {"memory.limit_in_bytes": "3000000", "memory.usage_in_bytes": "2000000", "memory.stat": "total_inactive_file 500"}
V2 = {"memory.max": "3000000", "memory.current": "2000000", "memory.stat": "inactive_file 500"}


def host(folder: Path, cgroup: str, files: dict[str, str], at: str) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a host like that."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(cgroup)
    (cgroups / at).mkdir(parents=True)
    for name, text in files.items():
        (cgroups / at / name).write_text(f"{text}\n")
    return proc, cgroups


@pytest.mark.parametrize(
    ("cgroup", "files", "at"),
    [
        pytest.param("0::/job.slice/a\n", V2, "job.slice/a", id="v2"),
        pytest.param("0::/../outside\n", V2, "", id="v2, in a container"),
        pytest.param("9:cpu,cpuacct:/x\n4:memory:/slurm/job\n0::/y\n", V1, "memory/slurm/job", id="v1"),
        pytest.param("4:memory:/docker/1\n", V1, "memory", id="v1, in a container"),
    ],
)
def test_the_own_control_group_is_the_limit(tmp_path: Path, cgroup: str, files: dict[str, str], at: str) -> None:
    proc, cgroups = host(tmp_path, cgroup, files, at)
    assert memory_limit_bytes(proc, cgroups) == 3_000_000
    assert memory_used_bytes(proc, cgroups) == 2_000_000 - 500


@pytest.mark.parametrize(
    "files", [{}, {**V2, "memory.max": "max"}, {**V1, "memory.limit_in_bytes": str((1 << 63) - 4096)}]
)
def test_without_a_limit_it_is_the_host(tmp_path: Path, files: dict[str, str]) -> None:
    at = "memory/a" if "memory.limit_in_bytes" in files else "a"
    proc, cgroups = host(tmp_path, "4:memory:/a\n" if at == "memory/a" else "0::/a\n", files, at)
    assert memory_limit_bytes(proc, cgroups) == 8000 * 1024
    assert memory_used_bytes(proc, cgroups) == 2000 * 1024
