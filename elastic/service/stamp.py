"""Pure: how a file of ours is told from one that somebody has edited. Its first line holds a checksum of the rest."""

from __future__ import annotations

import enum
import hashlib
import re

_LINE = re.compile(r"# elasticd install ([0-9a-f]{16}): [^\n]*\n")


class State(enum.Enum):
    """What there is, compared with what is to be there."""

    MISSING = "missing"
    SAME = "same"
    OLD = "of another version of ours, not edited"
    EDITED = "edited, or not ours"


def stamped(text: str) -> str:
    """`text` with its checksum before it, as a comment."""
    return (
        f"# elasticd install {_checksum(text)}: the checksum of what follows. Edits are kept by later installs.\n{text}"
    )


def state(found: str | None, wanted: str) -> State:
    """`found` is what the file holds, None where there is none; `wanted` is without a stamp."""
    if found is None:
        return State.MISSING
    if body(found) == wanted:
        return State.SAME
    return State.OLD if is_intact(found) else State.EDITED


def is_intact(found: str) -> bool:
    """Whether it is as an install has written it."""
    stamp = _LINE.match(found)
    return stamp is not None and stamp[1] == _checksum(body(found))


def body(text: str) -> str:
    """Without a stamp."""
    stamp = _LINE.match(text)
    return text[stamp.end() :] if stamp else text


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
