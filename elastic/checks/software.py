"""Versions that fit together: Python, torch, CUDA, NCCL and the driver. Imports torch, makes no CUDA context."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
from collections.abc import Iterator

from elastic import __version__
from elastic.checks.finding import Finding, Host, error, ok, warning

LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """As their makers write them; None where there is none."""

    python: str
    torch: str
    cuda: str | None = None  # what torch was built for
    nccl: str | None = None
    driver: str | None = None  # of NVIDIA, in the kernel
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver knows
    devices: bool = False  # there is hardware that the driver would be for


def installed(host: Host, driver_cuda: tuple[int, int] | None) -> Versions:
    """The versions of this process and of this host's kernel."""
    import torch

    described = host.read("driver/nvidia/version") or ""
    driver = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", described)
    return Versions(
        python=".".join(map(str, sys.version_info[:3])),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=_nccl() if torch.version.cuda else None,
        driver=driver[1] if driver else None,
        driver_cuda=driver_cuda,
        devices=any((host.sys / "bus/pci/drivers/nvidia").glob("0000:*")),
    )


def check_versions(found: Versions) -> Iterator[Finding]:
    """One finding for each part."""
    yield _at_least("python", "Python", found.python, LEAST_PYTHON, "install a newer Python and elasticd in it")
    yield _at_least("torch", f"elasticd {__version__}, torch", found.torch, LEAST_TORCH, "pip install --upgrade torch")
    yield from _cuda(found)


def check_etcd_client(needed: bool) -> Iterator[Finding]:
    """The client library, where many nodes are meant."""
    if not needed:
        return
    try:
        yield ok("etcd client", f"etcd3 {importlib.metadata.version('etcd3')}")
    except importlib.metadata.PackageNotFoundError:
        yield error("etcd client", "etcd3 is not installed; many nodes need it", "pip install 'elasticd[etcd]'")


def _cuda(found: Versions) -> Iterator[Finding]:
    if found.cuda is None:
        if found.driver or found.devices:
            message = (
                f"torch {found.torch} has no CUDA, but there is an NVIDIA driver {found.driver or 'for GPUs here'}"
            )
            yield warning("cuda", message, "install a build of torch with CUDA, or train on CPUs and ignore this")
        else:
            yield ok("cuda", "a CPU build of torch, and no NVIDIA driver here")
        return
    wanted = numbers(found.cuda)
    if found.driver is None:
        yield warning(
            "cuda", f"torch is built for CUDA {found.cuda}, no NVIDIA driver is loaded", "install the driver, or the "
            "CPU build of torch"
        )  # fmt: skip
    elif found.driver_cuda is not None and found.driver_cuda[0] < wanted[0]:
        known = ".".join(map(str, found.driver_cuda))
        message = f"torch is built for CUDA {found.cuda}, driver {found.driver} knows CUDA {known} at most"
        yield error("cuda", message, f"install a newer driver, or a torch built for CUDA {found.driver_cuda[0]}")
    else:
        yield ok("cuda", f"CUDA {found.cuda}, NCCL {found.nccl or 'none'}, driver {found.driver}")


def _at_least(check: str, name: str, version: str, least: tuple[int, ...], remedy: str) -> Finding:
    if numbers(version) < least:
        return error(check, f"{name} {version}; at least {'.'.join(map(str, least))} is needed", remedy)
    return ok(check, f"{name} {version}")


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _nccl() -> str | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's
