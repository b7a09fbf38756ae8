"""Pure: what each rank sees -> the one state that all restore. Who lacks it is sent it (`copies.py`).

A *line of descent*: every state carries its round and the step that round started from (`base_step`). A state of
round r at step s is void if a later round started from below s: that round's history does not contain it. Fencing
cannot give this (a paused machine resumes just before its rename); order is therefore (round, step), never the step
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed state as one rank sees it. The same `commit` means the same state, also in another directory."""

    name: str
    commit: str
    round: int
    base_step: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank sees in its directory: sound manifests, unsound ones as (path, reason), and rounds.json."""

    candidates: tuple[Candidate, ...]
    unsound: tuple[tuple[str, str], ...]
    rounds: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The state to try, or None; and those passed over, newest first, each with its reason."""

    chosen: Candidate | None
    skipped: tuple[tuple[str, str], ...]


def voiding_round(round_: int, step: int, rounds: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The (round, base_step) that makes a state void, or None when it is good."""
    return min(((r, base) for r, base in rounds if r > round_ and base < step), default=None)


def void_reason(by: tuple[int, int]) -> str:
    return f"void: round {by[0]} started from step {by[1]}, below it"


def choose(offers: Sequence[Offer], struck: Mapping[str, str], homes: Sequence[int]) -> Choice:
    """The newest state of the line that some home has whole and that is not struck.

    `homes` gives the home of each rank: ranks of one home see the same directory. `struck` maps a commit to its reason.
    """
    evidence = known_rounds(offers)
    everything = {c.commit: c for offer in reversed(offers) for c in offer.candidates}
    skipped: list[tuple[str, str]] = sorted({entry for offer in offers for entry in offer.unsound}, reverse=True)
    damaged = {name for name, _ in skipped}  # of what round they were is not known: go by the step
    ordered = sorted(everything.values(), key=lambda c: (c.round, c.step, c.commit), reverse=True)
    for candidate in ordered:
        reason = _objection(candidate, evidence, struck) or _blindness(candidate.commit, offers, homes)
        if reason is None:
            newer = [entry for entry in skipped if entry[0] not in damaged or entry[0] > candidate.name]
            return Choice(chosen=candidate, skipped=tuple(newer))
        skipped.append((candidate.name, reason))
    return Choice(chosen=None, skipped=tuple(skipped))


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
