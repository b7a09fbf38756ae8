"""Which pairs of nodes are measured when, and what to make of the figures. Pure."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence

from elastic.checks.finding import Finding, error, ok, warning

_SLOW_SHARE = 0.5  # of what the better quarter reaches: with one slow node of three, two pairs of three are slow
_LISTED = 28  # pairs of eight nodes: more of them are summed up where nothing is wrong


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What came out for two nodes, by their node ranks, left < right. `failure` = why there are no figures."""

    left: int
    right: int
    bytes_per_second: float = 0.0
    round_trip_seconds: float = 0.0
    failure: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Pair:
        """Raises: ValueError when `text` is no pair."""
        try:
            return cls(**json.loads(text))
        except TypeError as exc:
            raise ValueError(f"not a measured pair: {text[:200]!r}") from exc


def tournament(nodes: int) -> list[dict[int, int]]:
    """Rounds in which each node meets one other at most, so that no pair disturbs another; {node: its partner}.

    The circle method: one stays, the others move on by one seat each round.
    """
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        faced = zip(seats, reversed(seats), strict=True)
        rounds.append({left: right for left, right in faced if left is not None and right is not None})
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds


def merged(reports: Sequence[Pair]) -> list[Pair]:
    """One for each pair, of what both ends have said: a failure counts, else the slower figure."""
    best: dict[tuple[int, int], Pair] = {}
    for pair in reports:
        key = (pair.left, pair.right)
        other = best.get(key)
        if other is None or (not other.failure and (pair.failure or pair.bytes_per_second < other.bytes_per_second)):
            best[key] = pair
    return [best[key] for key in sorted(best)]


def judge(pairs: Sequence[Pair], names: Mapping[int, str]) -> Iterator[Finding]:
    """Broken ones are errors, slow ones warnings; both nodes are named."""
    broken = [pair for pair in pairs if pair.failure]
    measured = [pair for pair in pairs if not pair.failure]
    rates = sorted(pair.bytes_per_second for pair in measured)
    good = rates[len(rates) * 3 // 4] if rates else 0.0
    slow = [pair for pair in measured if len(measured) > 1 and pair.bytes_per_second < _SLOW_SHARE * good]
    for pair in broken:
        message = f"{_named(pair, names)}: {pair.failure}"
        yield error("pair", message, "look at cables, firewalls and routes between the two, and at their interfaces")
    yield from _blamed(broken, pairs, names, "no pair works")
    for pair in slow:
        message = f"{_named(pair, names)}: {_figures(pair)}; the better quarter of the pairs reaches {_rate(good)}"
        yield warning(
            "pair", message, "look at link speed, MTU and errors of both (ethtool), and at the switch between"
        )
    yield from _blamed(slow, pairs, names, "every pair is slow")
    if len(measured) <= _LISTED:
        for pair in measured:
            if pair not in slow:
                yield ok("pair", f"{_named(pair, names)}: {_figures(pair)}")
    elif measured:
        median = statistics.median(rates)
        yield ok("pairs", f"{len(measured)} pairs measured, {len(slow)} slow; the median is {_rate(median)}")


def _blamed(bad: Sequence[Pair], pairs: Sequence[Pair], names: Mapping[int, str], what: str) -> Iterator[Finding]:
    """The node that all its pairs point at, where another one's do not."""
    for rank, name in names.items():
        own = [pair for pair in pairs if rank in (pair.left, pair.right)]
        if len(own) > 1 and all(pair in bad for pair in own) and len(bad) < len(pairs):
            yield warning("node", f"{what} of node {name}: it is the likely cause", f"look at {name} first")


def _named(pair: Pair, names: Mapping[int, str]) -> str:
    return f"{names[pair.left]} - {names[pair.right]}"


def _figures(pair: Pair) -> str:
    return f"{_rate(pair.bytes_per_second)}, round trip {pair.round_trip_seconds * 1e6:.0f} us"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"
