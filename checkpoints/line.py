"""Whose commits those of a manager are."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Whose commits these are; the same for all commits of one manager but for the base step."""

    run_id: str
    incarnation: str
    round: int
    base_step: int
    rank: int
    world_size: int
    directory: str
    nonce: str
