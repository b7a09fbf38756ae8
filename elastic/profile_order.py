"""A profile of some steps, asked for while training runs: what the agent hands to its workers, and what they leave.

The request word of the progress block says that there is an order; the order itself lies in a file beside the block.
A rank leaves its trace and then, written last and whole, its summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_STEPS = 1000  # a trace holds every operator of every step
PARTS = ("compute", "exposed_communication", "data", "optimizer", "idle")  # disjoint; together they are the step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOrder:
    """`asked`: how many ranks have got it, all of one node; they begin when all of them have seen it."""

    name: str  # of this profile, the beginning of its files' names
    folder: str
    steps: int
    asked: int

    def trace(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.name}-rank{rank}.trace.json"

    def summary(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.name}-rank{rank}.summary.json"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProfileOrder:
        """Raises: ValueError when it is none."""
        try:
            return cls(**raw)
        except TypeError as exc:
            raise ValueError(f"not the order of a profile: {exc}") from exc


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """Where a step's time went on one rank: means over the steps, by PARTS. They add up to `step_seconds`.

    `seconds` is empty for a loop that enters no phases.
    """

    rank: int
    first_step: int
    last_step: int
    step_seconds: float
    seconds: Mapping[str, float]
    trace: str

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProfileSummary:
        """Raises: ValueError when it is none."""
        try:
            return cls(**raw)
        except TypeError as exc:
            raise ValueError(f"not the summary of a profile: {exc}") from exc


def beside(block: Path) -> Path:
    """Where the order of a worker lies."""
    return block.with_name(f"{block.name}.profile")


def write(path: Path, content: Mapping[str, Any]) -> None:
    """There whole or not at all. Raises: OSError."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text(json.dumps(content) + "\n")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
