"""GPUs and their health: what NVML says (`pip install 'elasticd[gpu]'`), and XIDs from the kernel's log."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from elastic.checks.finding import Finding, error, ok, warning
from elastic.status import plural

_SLOWED = {  # nvmlClocksEventReason*: only those that mean trouble; idle and power capping are everyday
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# NVIDIA's own list: these are said to be the program's doing, all else points at hardware or driver.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 137})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device, as far as it tells; None = it does not."""

    index: int
    name: str
    memory_bytes: int
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowed: int = 0  # bits of _SLOWED and others
    celsius: int | None = None
    other_bytes: int | None = None  # memory in use now


def load_nvml() -> Any:
    """NVML, initialised; None where nvidia-ml-py is not installed or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def driver_cuda(nvml: Any) -> tuple[int, int] | None:
    """The newest CUDA that the driver knows."""
    if nvml is None:
        return None
    with contextlib.suppress(nvml.NVMLError):
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return version // 1000, version % 1000 // 10
    return None


def read_gpus(nvml: Any) -> Iterator[Gpu]:
    for index in range(nvml.nvmlDeviceGetCount()):
        yield _read(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))


def check_gpus(gpus: Iterable[Gpu], workers: int) -> Iterator[Finding]:
    """Whether each is sound and there are enough for this node's workers."""
    found = list(gpus)
    for gpu in found:
        yield _health(gpu)
    if 0 < len(found) < workers:
        message = (
            f"{plural(workers, 'worker')} for {plural(len(found), 'GPU')}: several would share one, which NCCL refuses"
        )
        yield error("gpus", message, f"--nproc-per-node {len(found)}")


def check_xids(lines: Iterable[str]) -> Iterator[Finding]:
    """Errors that the driver has put into the kernel's log since the host was booted."""
    seen: dict[tuple[str, int], int] = {}
    for line in lines:
        if match := re.search(r"NVRM: Xid \(([^)]*)\): (\d+)", line):
            key = (match[1], int(match[2]))
            seen[key] = seen.get(key, 0) + 1
    for (device, xid), count in seen.items():
        message = f"Xid {xid} of {device} in the kernel's log, {count} times"
        if xid in _XIDS_OF_PROGRAMS:
            yield warning("xid", message, "most often a fault of the program that ran; dmesg | grep Xid")
        else:
            yield error("xid", message, "reset or replace the GPU; NVIDIA's list of Xid errors says what it means")


def kernel_log(path: Path = Path("/dev/kmsg")) -> list[str]:
    """What the kernel has said since boot. Raises: OSError where this user may not read it."""
    lines: list[str] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                lines.append(os.read(descriptor, 8192).decode(errors="replace"))
            except BlockingIOError:  # the newest line was the last one
                return lines
            except BrokenPipeError:  # lines were overwritten while we read: go on with the oldest that is left
                continue
            if not lines[-1]:
                return lines
    finally:
        os.close(descriptor)


def _health(gpu: Gpu) -> Finding:
    check, name = f"gpu {gpu.index}", gpu.name
    if gpu.remap_failed:
        return error(check, f"{name}: a memory row could not be replaced", "replace the GPU")
    if gpu.uncorrected:
        return error(check, f"{name}: {gpu.uncorrected} uncorrected ECC errors", "reset it (nvidia-smi -r); replace it "
                     "if they come again")  # fmt: skip
    if gpu.remap_pending:
        return warning(check, f"{name}: a memory row waits to be replaced", "reset it: nvidia-smi -r")
    reasons = [text for bit, text in _SLOWED.items() if gpu.slowed & bit]
    if reasons:
        heat = f" at {gpu.celsius} C" if gpu.celsius is not None else ""
        return warning(check, f"{name}: slowed down{heat} ({', '.join(reasons)})", "look at cooling and power supply")
    if gpu.other_bytes and gpu.other_bytes > 0.1 * gpu.memory_bytes:
        share = gpu.other_bytes / gpu.memory_bytes
        return warning(check, f"{name}: {share:.0%} of its memory is in use", "nvidia-smi shows by whom")
    return ok(check, f"{name}, {gpu.memory_bytes / 1e9:.0f} GB" + (f", {gpu.celsius} C" if gpu.celsius else ""))


def _read(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(function: str, *arguments: Any) -> Any:
        """None where this device, driver or version of NVML cannot say."""
        call = getattr(nvml, function, None)
        if call is None:
            return None
        try:
            return call(handle, *arguments)
        except nvml.NVMLError:
            return None

    name, memory, rows = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetRemappedRows")
    slowed = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if slowed is None:  # its name before driver 535
        slowed = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name or "unknown",
        memory_bytes=memory.total if memory is not None else 0,
        other_bytes=memory.used if memory is not None else None,
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        remap_pending=bool(rows[2]) if rows is not None else None,
        remap_failed=bool(rows[3]) if rows is not None else None,
        slowed=slowed or 0,
        celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    )
