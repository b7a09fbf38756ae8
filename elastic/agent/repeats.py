"""A failure that comes back in the same place is not retried for ever: same rank, step, kind of error and line. Pure.

Known to the agent that ran the rank: ranks stay on their nodes as long as these stay, and a rank that has moved is
counted anew. Errors of communication, signals and exits without a traceback have no place, and are left to the budget.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

LIMIT = 3  # a second one may be chance (fragmented memory, a file server that is away for a minute)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank failed; `step` is the one that it could not finish."""

    rank: int
    step: int
    error: str
    frame: str


def place_of(message: str, *, rank: int, applied_step: int) -> Place | None:
    """From the exception's text with its traceback; None where there is none, or no step was begun."""
    frames = list(_FRAME.finditer(message))
    error = _ERROR.match(message)
    if not frames or error is None or applied_step < 0:
        return None
    frame = "{file}:{line} in {name}".format(**frames[-1].groupdict())
    return Place(rank=rank, step=applied_step + 1, error=error[0], frame=frame)


def note(known: Mapping[Place, int], place: Place | None, *, applied_step: int) -> dict[Place, int]:
    """How often each place has failed, with this failure, in a round whose ranks have all applied `applied_step`.

    A step that was applied after all did not fail for good.
    """
    kept = {old: times for old, times in known.items() if old.step > applied_step}
    return kept if place is None else {**kept, place: kept.get(place, 0) + 1}
