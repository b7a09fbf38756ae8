"""Pure: who has a whole copy of which commit, and who is to send it to those that have not. Rank 0's view of it.

The lowest rank of a home (see `choose.py`) receives for all of it and sends for all.
Every failed attempt teaches something (a copy is damaged, a sender does not reach a receiver, a disk takes nothing), so
the attempts at one commit end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .choose import Homes, Offer, holding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """For each home that lacks the chosen state the one that sends it; those in `direct` keep no copy."""

    senders: Mapping[int, int]
    direct: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one rank fared with the candidate. `sender_failed`: what went wrong lies between it and the sender."""

    error: str | None = None
    kind: str | None = None
    sender_failed: bool = False
    direct: bool = False


class Copies:
    """What is known of the copies."""

    def __init__(self, offers: Sequence[Offer], homes: Homes) -> None:
        self._offers, self._homes = offers, homes
        self._tiers = {candidate.commit: candidate.tier for offer in offers for candidate in offer.candidates}
        self._damaged: set[tuple[str, int]] = set()
        self._received: set[tuple[str, int]] = set()
        self._cut_off: set[tuple[str, int, int]] = set()
        self._direct = set(homes.keepless)

    def plan(self, commit: str) -> Plan | None:
        """How all come to have `commit`; None when some home cannot get it any more."""
        tier = self._tiers.get(commit, "disk")
        homes = self._homes.of(tier)
        holders = set(holding(commit, self._offers, homes)) | {h for c, h in self._received if c == commit}
        holders -= {home for c, home in self._damaged if c == commit}
        senders = {}
        for number, home in enumerate(sorted(set(homes) - holders)):
            able = [h for h in sorted(holders) if (commit, h, home) not in self._cut_off]
            if not able:
                return None
            senders[home] = able[number % len(able)]
        return Plan(senders=senders, direct=frozenset(home for home in senders if (tier, home) in self._direct))

    def learn(self, commit: str, plan: Plan, reports: Sequence[Report]) -> None:
        """Take in how an attempt went; `reports` come by rank, at least one with an error."""
        tier = self._tiers.get(commit, "disk")
        homes = self._homes.of(tier)
        for home in sorted(set(homes)):
            mine = [report for rank, report in enumerate(reports) if homes[rank] == home]
            failed = [report for report in mine if report.error is not None]
            if failed and (home in plan.direct or any(report.sender_failed for report in failed)):
                self._cut_off.add((commit, plan.senders[home], home))
            elif failed and home in plan.senders:
                self._direct.add((tier, home))
            elif failed:
                self._damaged.add((commit, home))
            elif home in plan.senders and not any(report.direct for report in mine):
                self._received.add((commit, home))
