"""What a worker leaves behind for a run to be judged by: its ledger, its losses, the digest of its parameters.

How they are read is said in `ledger` and `outcome`, which need no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import UsageError
from elastic.training.task import AppliedStep


class LineFile:
    """JSON lines, each appended in one write, so that many processes can share the file and a kill cuts no line."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise UsageError(f"cannot write {path}: {exc.strerror or exc}; give a file in a folder of yours") from exc
        self._path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises: OSError when the line is not written whole."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"{self._path}: only {written} of {len(line)} bytes were written; is the disk full?")

    def close(self) -> None:
        os.close(self._descriptor)


def ledger_record(step: AppliedStep) -> dict[str, Any]:
    """The ledger's line about one rank's part of one step."""
    return {
        "round": step.round,
        "step": step.step,
        "epoch": step.epoch,
        "rank": step.rank,
        "samples": list(step.samples),
    }


def parameter_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes, types and bytes of all parameters: equal only when every bit is."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_digest(path: Path, *, step: int, digest: str) -> None:
    """One line, `step digest`; readers find the whole line or no new file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w") as file:
            file.write(f"{step} {digest}\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
