"""Whose round a directory is in: put on record before a round commits anything, and looked for before each commit.

Locks keep two jobs of one host apart, and not those of two hosts without common locks, nor a job that has not seen that
its directory was unmounted. The record does: whoever is not its owner commits nothing, and says why.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from .errors import CheckpointError, StaleRoundError
from .line import Line
from .manifest import ROUNDS
from .rounds import Record, read_record, record_rounds
from .storage import LocalStorage, Storage

logger = logging.getLogger(__name__)


class Claim:
    """One rank's view of its directory's record. Leaders of writing groups stake it; all look for it.

    `folder`: the node's memory, which remembers for the rounds to come in which ones it took part, and whether the
    directory had its record then. Used by a manager's thread at the restore and by its background thread afterwards,
    never by both at a time.
    """

    def __init__(self, storage: Storage, directory: str, folder: Path | None) -> None:
        self._storage, self._folder = storage, folder
        before = self._read_folder().owner  # (round, directory)
        self._is_staked, self._was_seen = False, before is not None and before[1] == directory
        # The round that the directory was in, as far as is known here: it never goes back.
        self._seen_round = before[0] if before is not None and self._was_seen else 0

    @property
    def newest(self) -> tuple[int, int]:
        """The last round that this node took part in, and its base step, as its memory knows; (0, 0) for none."""
        return max(self._read_folder().rounds, default=(0, 0))

    @property
    def newest_round(self) -> int:
        return self.newest[0]

    def stake(self, line: Line) -> None:
        """A leader's: this round is the one that the directory is in from now on.

        Of two programs without an incarnation that are in one round the later one has it.

        Raises:
            StaleRoundError: a later round is, or this one of another job.
            CheckpointError, OSError: see `look`.
        """
        self.look(line)
        record = read_record(self._storage, line.directory)
        if reason := self._set_back(line, record) or later_round(line, record):
            raise StaleRoundError(reason)
        if line.incarnation and (reason := another_owner(line, record)):
            raise StaleRoundError(reason)
        record_rounds(self._storage, line.directory, [(line.round, line.base_step)], owner=(line.round, whose(line)))
        self._is_staked = self._was_seen = True
        self._seen_round = line.round

    def note(self, line: Line) -> None:
        """One rank's of each node, once a restore is decided: the node's memory takes part in this round."""
        if self._folder is None:
            return
        owner = None
        with contextlib.suppress(CheckpointError, OSError):
            self.look(line)
            record = read_record(self._storage, line.directory)
            if record is not None and record.rounds:
                owner = (max(round_ for round_, _ in record.rounds), line.directory)
        try:
            record_rounds(LocalStorage(), str(self._folder), [(line.round, line.base_step)], owner=owner)
        except OSError as exc:
            logger.warning("round %d could not be recorded in %s: %s", line.round, self._folder, exc)

    def look(self, line: Line) -> None:
        """Any rank's, before it reads or writes: that this is the directory which the job was in before.

        Raises:
            CheckpointError: its record was there, and is gone. Whether it can be read at all others find out.
        """
        path = self._storage.join(line.directory, ROUNDS)
        try:
            is_there = self._storage.size(path) is not None
        except OSError:
            return
        if self._was_seen and not is_there:
            raise CheckpointError(
                f"{path} was there and is gone: the directory was unmounted, replaced or emptied. Put it back, or stop "
                "the job and start it again to begin in what is there now"
            )
        self._was_seen = is_there

    def renew(self, line: Line) -> None:
        """A leader's, before it publishes: as `check`. What could not be put on record at the start is, now."""
        record = self.check(line)
        if not self._is_staked or record is None or record.owner is None:
            self.stake(line)

    def check(self, line: Line) -> Record | None:
        """The directory's record, which says nothing against a commit of this round.

        Raises:
            StaleRoundError: a later round has begun there, or this one of another job.
            CheckpointError, OSError: see `look`.
        """
        self.look(line)
        record = read_record(self._storage, line.directory)
        if reason := self._set_back(line, record) or later_round(line, record) or another_owner(line, record):
            raise StaleRoundError(reason)
        return record

    def _set_back(self, line: Line, record: Record | None) -> str:
        """Why this is another directory than before, though it has a record; empty when it is not."""
        newest = max((round_ for round_, _ in record.rounds), default=0) if record is not None else 0
        if record is None or not record.rounds or newest >= self._seen_round:
            return ""
        return (
            f"{line.directory} was in round {self._seen_round} and is in round {newest}: it was emptied or replaced, "
            "and another job has begun in it. Give each job a directory of its own"
        )

    def _read_folder(self) -> Record:
        record = None
        if self._folder is not None:
            with contextlib.suppress(OSError):
                record = read_record(LocalStorage(), str(self._folder))
        return record or Record(rounds=())


def whose(line: Line) -> str:
    """The same for all managers of a job's round; a program that has no incarnation is told by its manager's nonce."""
    return f"{line.run_id}/{line.incarnation}" if line.incarnation else line.nonce


def later_round(line: Line, record: Record | None) -> str:
    """Why this round may not commit any more; empty when no later one has begun."""
    later = max((round_ for round_, _ in record.rounds), default=0) if record is not None else 0
    if later <= line.round:
        return ""
    return (
        f"round {later} has begun in {line.directory}, and this is round {line.round}: another job has been started "
        "with this directory, or a newer round of this one. Give each job a directory of its own"
    )


def another_owner(line: Line, record: Record | None) -> str:
    """The same for this round, begun by another job: both have seen the same directory before either was on record."""
    if record is None or record.owner is None or record.owner[0] != line.round or record.owner[1] == whose(line):
        return ""
    return (
        f"round {line.round} has been begun in {line.directory} by another job as well ({record.owner[1]!r}, this is "
        f"{whose(line)!r}). Give each job a directory of its own"
    )
