"""DIR/rounds.json: {"rounds": [[round, base_step], ..], "checksum": xxh3 of all the rest}, so that a round that never
commits still voids the states above its base."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from . import manifest as manifests
from . import strict
from .errors import CorruptCheckpointError
from .manifest import ROUNDS, Manifest, parse_step, parse_writing
from .storage import Storage

logger = logging.getLogger(__name__)
_MOST_ENTRIES = 1000


def read_rounds(storage: Storage, directory: str) -> tuple[tuple[int, int], ...]:
    """The rounds on record; none when the file is missing or damaged (the manifests are evidence as well)."""
    path = storage.join(directory, ROUNDS)
    try:
        return _parse(storage.read(path)) if storage.size(path) is not None else ()
    except (OSError, ValueError) as exc:
        logger.warning("%s is unreadable and ignored: %s", path, exc)
        return ()


def record_rounds(storage: Storage, directory: str, entries: Iterable[tuple[int, int]]) -> None:
    """Add rounds, durably.

    Called by a group's leader once a restore is decided, before the round commits anything; and before it takes a
    peer's checkpoint in, with all that the peers know, so that a directory that was away learns what is void.
    """
    known = frontier([*read_rounds(storage, directory), *entries])
    storage.make_directory(directory)
    with contextlib.suppress(OSError):  # a parent that may not be read is as durable as its owner made it
        storage.sync_directory(directory.rpartition("/")[0] or "/")
    storage.replace(storage.join(directory, ROUNDS), _dump(known[-_MOST_ENTRIES:]))


def _dump(entries: Sequence[tuple[int, int]]) -> bytes:
    body = {"rounds": entries}
    return manifests.canonical({**body, "checksum": manifests.checksum(manifests.canonical(body))})


def _parse(data: bytes) -> tuple[tuple[int, int], ...]:
    """The inverse of `_dump`; ValueError when it is damaged."""
    body = strict.loads(data)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    expected = body.pop("checksum", None)
    if manifests.checksum(manifests.canonical(body)) != expected:
        raise ValueError("it does not match its own checksum: damaged or edited")
    entries: tuple[tuple[int, int], ...] = strict.convert(tuple[tuple[int, int], ...], body.get("rounds"), "rounds")
    return entries


def frontier(entries: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The entries that matter: one that began later and lower voids all that an earlier, higher one does."""
    lowest: list[tuple[int, int]] = []
    for round_, base in sorted(set(entries), key=lambda entry: (-entry[0], entry[1])):
        if not lowest or base < lowest[-1][1]:
            lowest.append((round_, base))
    return lowest[::-1]


def manifests_in(storage: Storage, directory: str) -> Iterable[Manifest]:
    """The sound manifests of committed steps."""
    for name in storage.names(directory):
        if parse_step(name) is not None:
            try:
                yield manifests.read(storage, storage.join(directory, name))
            except CorruptCheckpointError as exc:
                logger.debug("%s: %s", name, exc)


def newest_name(storage: Storage, directory: str) -> str | None:
    """The committed step of the highest number, sound or not; None when there is none."""
    return max((name for name in storage.names(directory) if parse_step(name) is not None), default=None)


def highest_round(storage: Storage, directory: str) -> int:
    """The highest round that has left a trace in the directory; 0 when none has."""
    written = [parse_writing(name) for name in storage.names(directory)]
    return max(
        [
            0,
            *(round_ for round_, _ in read_rounds(storage, directory)),
            *(manifest.round for manifest in manifests_in(storage, directory)),
            *(entry[1] for entry in written if entry is not None),
        ]
    )
