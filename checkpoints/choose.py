"""Pure: what each rank sees -> the one state that all restore. Who lacks it is sent it (`copies.py`).

A *home* is the ranks that see the same: of the disk tier those that share a directory, of the memory tier those of one
node. It is named by the lowest of its ranks.

A *line of descent*: every state carries its round and the step that round started from (`base_step`). A state of
round r at step s is void if a later round started from below s: that round's history does not contain it. Fencing
cannot give this (a paused machine resumes just before its rename); order is therefore (round, step), never the step
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

Tier = Literal["disk", "memory"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A whole state as one rank sees it. The same `commit` means the same state, also in another directory."""

    name: str
    commit: str
    round: int
    base_step: int
    step: int
    tier: Tier = "disk"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank sees: whole states, unsound checkpoints as (name, reason), and the rounds on record.

    `node` is the same for ranks that see the same shared memory, and empty for a rank that has none; `newest_round` is
    the last one which that memory took part in.
    """

    candidates: tuple[Candidate, ...]
    unsound: tuple[tuple[str, str], ...]
    rounds: tuple[tuple[int, int], ...]
    node: str = ""
    newest_round: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """The home of each rank in either tier, and the homes that keep no copy of what they are sent."""

    disk: tuple[int, ...]
    memory: tuple[int, ...] = ()
    keepless: frozenset[tuple[Tier, int]] = frozenset()

    def of(self, tier: Tier) -> tuple[int, ...]:
        return self.disk if tier == "disk" else self.memory


def find_homes(offers: Sequence[Offer], disk: Sequence[int], *, writable: bool) -> Homes:
    """`disk` gives each rank's home there; unless `writable` none of those keeps a copy."""
    first: dict[str, int] = {}
    memory = tuple(first.setdefault(o.node, rank) if o.node else rank for rank, o in enumerate(offers))
    keepless: set[tuple[Tier, int]] = {("memory", rank) for rank, o in enumerate(offers) if not o.node}
    if not writable:
        keepless |= {("disk", home) for home in disk}
    return Homes(disk=tuple(disk), memory=memory, keepless=frozenset(keepless))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The state to try, or None; and those passed over, newest first, each with its reason.

    `refuse`: nothing is good and a checkpoint on disk is among what is not, so that a fresh start would lose it. What
    memory alone held is gone as it would be without the tier.
    """

    chosen: Candidate | None
    skipped: tuple[tuple[str, str], ...]
    refuse: bool = False


def voiding_round(round_: int, step: int, rounds: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The (round, base_step) that makes a state void, or None when it is good."""
    return min(((r, base) for r, base in rounds if r > round_ and base < step), default=None)


def void_reason(by: tuple[int, int]) -> str:
    return f"void: round {by[0]} started from step {by[1]}, below it"


def choose(offers: Sequence[Offer], struck: Mapping[str, str], homes: Homes) -> Choice:
    """The newest state of the line that some home has whole and that is not struck; memory before disk.

    `struck` maps a commit to its reason.
    """
    evidence = known_rounds(offers)
    everything = {c.commit: c for offer in reversed(offers) for c in offer.candidates}
    skipped: list[tuple[str, str]] = sorted({entry for offer in offers for entry in offer.unsound}, reverse=True)
    damaged = {name for name, _ in skipped}  # of what round they were is not known: go by the step
    ordered = sorted(everything.values(), key=lambda c: (c.round, c.step, c.tier == "memory", c.commit), reverse=True)
    for candidate in ordered:
        blind = _blindness(candidate.commit, offers, homes.of(candidate.tier))
        reason = _objection(candidate, evidence, struck) or blind
        if reason is None:
            newer = [entry for entry in skipped if entry[0] not in damaged or entry[0] > candidate.name]
            return Choice(chosen=candidate, skipped=tuple(newer))
        skipped.append((candidate.name, reason))
    on_disk = bool(damaged) or any(candidate.tier == "disk" for candidate in ordered)
    return Choice(chosen=None, skipped=tuple(skipped), refuse=on_disk)


def known_rounds(offers: Iterable[Offer]) -> set[tuple[int, int]]:
    """Every (round, base_step) that any rank has evidence of."""
    evidence = {entry for offer in offers for entry in offer.rounds}
    return evidence | {(c.round, c.base_step) for offer in offers for c in offer.candidates}


def holding(commit: str, offers: Sequence[Offer], homes: Sequence[int]) -> list[int]:
    """The homes of which every rank sees this commit, lowest first."""
    return sorted(set(homes) - {homes[rank] for rank in _blind(commit, offers)})


def _blind(commit: str, offers: Sequence[Offer]) -> list[int]:
    return [rank for rank, offer in enumerate(offers) if all(c.commit != commit for c in offer.candidates)]


def _objection(candidate: Candidate, evidence: Iterable[tuple[int, int]], struck: Mapping[str, str]) -> str | None:
    by = voiding_round(candidate.round, candidate.step, evidence)
    if by is not None:
        return void_reason(by)
    return struck.get(candidate.commit)


def _blindness(commit: str, offers: Sequence[Offer], homes: Sequence[int]) -> str | None:
    if holding(commit, offers, homes):
        return None
    ranks = ", ".join(map(str, _blind(commit, offers)))
    return f"not readable by rank {ranks}: every rank that shares the directory must see the whole state"
