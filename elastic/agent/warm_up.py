"""What a standby does before it is needed; run by `standby.py`, which loads this file alone and by its path.

Everything here happens in a process of its own that has not begun to be a worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator


def warm_up(folder: str, preload: list[str]) -> dict[str, str]:
    """Import ahead what takes a worker seconds; returns the preload modules that cannot be, each with its error.

    `folder` is what the program will have first on its path, so that --preload finds what lies beside it.

    No thread, no process group, no CUDA context, no random number drawn. What remains different from a cold start: the
    script's first lines come too late for a variable that torch reads at its import (OMP_NUM_THREADS, TORCH_LOGS).
    """
    gc.disable()  # a fifth of the imports would be the search for garbage among what they make
    environ = dict(os.environ)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking CUDA itself would fix CUDA_VISIBLE_DEVICES
    failed: dict[str, str] = {}
    with contextlib.suppress(ImportError):
        _import_torch()
    with contextlib.suppress(ImportError):  # another interpreter may have no elasticd
        importlib.import_module("elastic.training.trainer")
        importlib.import_module("elastic.own_checkpoints").own_checkpoints("manager")
    os.environ.clear()
    os.environ.update(environ)
    sys.path.insert(0, folder)
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as exc:  # noqa: BLE001 - whatever a module does at its import, the standby goes on
            failed[name] = f"{type(exc).__name__}: {exc}"[:1000]
    del sys.path[0]
    gc.collect()
    gc.freeze()  # a collection in the middle of a recovery need not look through all of torch
    gc.enable()
    return failed


def _import_torch() -> None:
    """torch, torch.distributed, DDP, and what the constructor of DDP and an optimizer import at their first use."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel

    torch.zeros(2, 2) @ torch.zeros(2, 2)  # sets up what multiplies; no backward, which would ask CUDA for its devices
    weight = torch.nn.Parameter(torch.zeros(1))
    for optimizer in (torch.optim.SGD([weight], lr=0.1, momentum=0.9), torch.optim.AdamW([weight])):
        weight.grad = torch.zeros(1)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What is printed meanwhile is nobody's output: no worker has begun."""
    kept = []
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed from the start
            kept.append((number, os.dup(number)))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, _ in kept:
        os.dup2(nowhere, number)
    os.close(nowhere)
    try:
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def show_as(command: list[str]) -> None:
    """Let `ps` and `pkill -f` find the worker's command where they saw the standby's placeholder, as far as it fits."""
    placeholder = os.fsencode(sys.argv[2])
    text = b"\0".join(map(os.fsencode, command))[: len(placeholder)].ljust(len(placeholder), b"\0")
    try:
        import ctypes

        with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123
            begin, end = map(int, stat.read().rpartition(b")")[2].split()[45:47])
        shown = ctypes.string_at(begin, end - begin) if begin else b""
        if placeholder in shown:
            ctypes.memmove(begin + shown.rindex(placeholder), text, len(text))
    except (ImportError, OSError, ValueError):
        return
