"""What one node knows of the job's two shared keys, `round` and `leader`, and when it learned it.

News may come twice, late and in any order, from watches, reads and own writes: the newer revision wins.
"""

from __future__ import annotations

import logging

from elastic.rendezvous.records import News
from elastic.rendezvous.round import Phase, Round
from elastic.rendezvous.store import Entry

logger = logging.getLogger(__name__)

GHOST_SECONDS = 1.0  # beyond its ttl: by then the store has ended the lease of a node that is dead


class Chronicle:
    """The newest round and leader, and what only their history tells."""

    def __init__(self) -> None:
        self.round: Round | None = None
        self.round_entry: Entry | None = None
        self.leader_entry: Entry | None = None
        self.news: News | None = None
        self.leader_since = 0.0  # when this leader's key was first seen
        self.ended_at = 0.0  # when `round` was first seen not running
        self.let_in: dict[tuple[str, int], float] = {}  # seats of `round` that joined the job while it lived
        self.highest = 0  # round number ever seen
        self._round_revision = -1
        self._leader_revision = -1

    def is_newer_than(self, revision: int) -> bool:
        """Whether more is known than a store at that revision can hold: it has been put back to an older state."""
        return max(self._round_revision, self._leader_revision) > revision

    def forget_revisions(self) -> None:
        """Believe what comes next, whatever its revision: the store may have been put back to an older state."""
        self._round_revision = self._leader_revision = -1

    def take_round(self, entry: Entry | None, revision: int, now: float) -> bool:
        """What `round` was at `revision`; returns whether the round is another one, or in another phase, than known."""
        if revision <= self._round_revision:
            return False
        self._round_revision = revision
        if entry == self.round_entry:
            return False  # read again
        try:
            taken = Round.from_json(entry.value) if entry is not None else None
        except ValueError as exc:
            logger.error(
                "%s: %s; it is ignored, and no round can follow until it is gone: delete the key, "
                "where no newer elasticd has written it",
                *(entry.key if entry else "", exc),
            )
            return False
        before, self.round, self.round_entry = self.round, taken, entry
        if taken == before:
            return False
        self._note(before, taken, now)
        return True

    def _note(self, before: Round | None, taken: Round | None, now: float) -> None:
        if taken is None:
            self.let_in = {}
            return
        self.highest = max(self.highest, taken.number)
        is_same = before is not None and before.number == taken.number
        if taken.phase is not Phase.RUNNING and (before is None or not is_same or before.phase is Phase.RUNNING):
            self.ended_at = now
        if is_same:
            return
        seats = {(member.node_id, member.join) for member in taken.members}
        self.let_in = {seat: since for seat, since in self.let_in.items() if seat in seats}
        if before is not None and before.incarnation == taken.incarnation:
            old = {(member.node_id, member.join) for member in before.members}
            self.let_in = {**dict.fromkeys(seats - old, now), **self.let_in}

    def take_leader(self, entry: Entry | None, revision: int, now: float) -> bool:
        """What `leader` was at `revision`; returns whether that is new."""
        if revision <= self._leader_revision:
            return False
        self._leader_revision = revision
        before = self.leader_entry
        if entry == before:
            return False
        if entry is None or before is None or entry.create_revision != before.create_revision:
            self.leader_since = now
        self.leader_entry = entry
        try:
            self.news = News.from_json(entry.value) if entry is not None else None
        except ValueError as exc:
            logger.error("%s: %s", entry.key if entry else "", exc)
            self.news = None
        return True
