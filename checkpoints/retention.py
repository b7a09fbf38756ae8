"""Pure: which committed steps may go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One step directory as retention sees it. `sound`: its manifest is whole and its files are there in full size."""

    name: str
    round: int
    step: int
    sound: bool
    void: bool


def removable(steps: Sequence[Kept], *, keep_last: int, keep_every: int | None) -> list[str]:
    """Names of those that may be removed, oldest first.

    Kept are the last `keep_last` good ones, every good one whose step is a multiple of `keep_every`, and whatever
    could not be verified. A void one may go once a good one is newer; the newest good one never goes.
    """
    good = sorted((s for s in steps if s.sound and not s.void), key=lambda s: (s.round, s.step))
    if not good:
        return []
    last = {s.name for s in good[-max(keep_last, 1) :]}
    old = [s for s in good if s.name not in last and not (keep_every and s.step % keep_every == 0)]
    newest = good[-1]
    dead = [s for s in steps if s.sound and s.void and s.round < newest.round]
    return [s.name for s in sorted([*old, *dead], key=lambda s: (s.round, s.step))]
