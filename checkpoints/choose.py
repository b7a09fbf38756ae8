"""Pure: what each rank sees -> the one state that all restore.

A *line of descent*: every state carries its round and the step that round started from (`base_step`). A state of
round r at step s is void if a later round started from below s: that round's history does not contain it. Fencing
cannot give this (a paused machine resumes just before its rename); order is therefore (round, step), never the step
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


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


def choose(offers: Sequence[Offer], struck: dict[str, str]) -> Choice:
    """The newest state of the line that every rank sees and none has struck. `struck` maps a commit to its reason."""
    evidence = {entry for offer in offers for entry in offer.rounds}
    evidence |= {(c.round, c.base_step) for offer in offers for c in offer.candidates}
    everything = {c.commit: c for offer in reversed(offers) for c in offer.candidates}
    skipped: list[tuple[str, str]] = sorted({entry for offer in offers for entry in offer.unsound}, reverse=True)
    damaged = {name for name, _ in skipped}  # of what round they were is not known: go by the step
    ordered = sorted(everything.values(), key=lambda c: (c.round, c.step, c.commit), reverse=True)
    for candidate in ordered:
        reason = _objection(candidate, offers, evidence, struck)
        if reason is None:
            newer = [entry for entry in skipped if entry[0] not in damaged or entry[0] > candidate.name]
            return Choice(chosen=candidate, skipped=tuple(newer))
        skipped.append((candidate.name, reason))
    return Choice(chosen=None, skipped=tuple(skipped))


def _objection(
    candidate: Candidate, offers: Sequence[Offer], evidence: Iterable[tuple[int, int]], struck: dict[str, str]
) -> str | None:
    by = voiding_round(candidate.round, candidate.step, evidence)
    if by is not None:
        return void_reason(by)
    if candidate.commit in struck:
        return struck[candidate.commit]
    blind = [rank for rank, offer in enumerate(offers) if all(c.commit != candidate.commit for c in offer.candidates)]
    if blind:
        ranks = ", ".join(map(str, blind))
        return f"not readable by rank {ranks}: every rank needs the whole state in its own directory or a shared one"
    return None
