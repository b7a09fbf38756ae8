"""DIR/rounds.json: {"rounds": [[round, base_step], ..], "owner": [round, who], "checksum": xxh3 of all the rest}, so
that a round that never commits still voids the states above its base, and that two jobs cannot both be in one round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Iterable

from . import manifest as manifests
from . import strict
from .errors import CorruptCheckpointError
from .manifest import ROUNDS, Manifest, parse_step, parse_writing
from .storage import Storage

logger = logging.getLogger(__name__)
_MOST_ENTRIES = 1000
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.EINVAL)  # something else has that name, and gives way to the next record


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the file says. `owner`: (round, whose it is), of the last one that said so; None in older files."""

    rounds: tuple[tuple[int, int], ...]
    owner: tuple[int, str] | None = None


def read_record(storage: Storage, directory: str) -> Record | None:
    """None when there is no such file, an empty record when it is damaged (the manifests are evidence as well).

    Raises: OSError.
    """
    path = storage.join(directory, ROUNDS)
    try:
        return _parse(storage.read(path)) if storage.size(path) is not None else None
    except OSError as exc:
        if exc.errno not in _NO_FILE:
            raise
        logger.warning("%s is no file and ignored: %s", path, exc)
    except ValueError as exc:
        logger.warning("%s is unreadable and ignored: %s", path, exc)
    return Record(rounds=())


def read_rounds(storage: Storage, directory: str) -> tuple[tuple[int, int], ...]:
    """The rounds on record; none when the file is missing, damaged, or cannot be read."""
    try:
        record = read_record(storage, directory)
    except OSError as exc:
        logger.warning("%s is unreadable and ignored: %s", storage.join(directory, ROUNDS), exc)
        return ()
    return record.rounds if record is not None else ()


def record_rounds(
    storage: Storage, directory: str, entries: Iterable[tuple[int, int]], *, owner: tuple[int, str] | None = None
) -> None:
    """Add rounds, durably; without an `owner` that stays as it is.

    Called by a group's leader once a restore is decided, before the round commits anything (see `claim.py`); and before
    it takes a peer's checkpoint in, with all that the peers know, so that a directory that was away learns what is
    void.
    """
    storage.make_directory(directory)
    with contextlib.suppress(OSError):  # a parent that may not be read is as durable as its owner made it
        storage.sync_directory(directory.rpartition("/")[0] or "/")
    before = read_record(storage, directory) or Record(rounds=())
    known = frontier([*before.rounds, *entries])
    record = Record(rounds=tuple(known[-_MOST_ENTRIES:]), owner=owner or before.owner)
    storage.replace(storage.join(directory, ROUNDS), _dump(record))


def _dump(record: Record) -> bytes:
    body = {"rounds": record.rounds, **({"owner": record.owner} if record.owner is not None else {})}
    return manifests.canonical({**body, "checksum": manifests.checksum(manifests.canonical(body))})


def _parse(data: bytes) -> Record:
    """The inverse of `_dump`; ValueError when it is damaged."""
    body = strict.loads(data)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    expected = body.pop("checksum", None)
    if manifests.checksum(manifests.canonical(body)) != expected:
        raise ValueError("it does not match its own checksum: damaged or edited")
    record: Record = strict.build(Record, body)
    return record


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
