"""Pure: reads when which round trained with how many ranks out of a run's ledger and losses."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Sequence

from elastic.demo.ledger import Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What one round did. Times are unix seconds, None where rank 0 has not told them."""

    round: int
    ranks: int
    first_step: int
    last_step: int  # that any rank has applied
    began: float | None  # when its first step was applied
    ended: float | None  # and when its last was


def stretches(entries: Iterable[Entry], losses: str) -> tuple[Stretch, ...]:
    """Every round that applied a step, in order. `losses` is the text of the file that rank 0 appends to."""
    by_round: dict[int, list[Entry]] = collections.defaultdict(list)
    for entry in entries:
        by_round[entry.round].append(entry)
    times = _times(losses)
    return tuple(
        Stretch(
            round=number,
            ranks=len({entry.rank for entry in found}),
            first_step=min(entry.step for entry in found),
            last_step=max(entry.step for entry in found),
            began=min(times.get(number, ()), default=None),
            ended=max(times.get(number, ()), default=None),
        )
        for number, found in sorted(by_round.items())
    )


def in_words(found: Sequence[Stretch]) -> list[str]:
    """`steps 1-60: 3 ranks` for each change of the world size; a round that goes on with as many is not a change."""
    words: list[str] = []
    first: Stretch | None = None
    for stretch, following in zip(found, [*found[1:], None], strict=True):
        first = first or stretch
        if following is None or following.ranks != stretch.ranks:
            words.append(f"steps {first.first_step}-{stretch.last_step}: {_ranks(stretch.ranks)}")
            first = None
    return words


def pause_seconds(found: Sequence[Stretch], round_number: int) -> float | None:
    """From the last step before a round to its first one."""
    before = max((s.ended for s in found if s.round < round_number and s.ended is not None), default=None)
    began = began_at(found, round_number)
    return None if before is None or began is None else began - before


def began_at(found: Sequence[Stretch], round_number: int) -> float | None:
    """When a round, or where it applied nothing the one after it, had its first step."""
    return min((s.began for s in found if s.round >= round_number and s.began is not None), default=None)


def repeated_steps(found: Sequence[Stretch], round_number: int) -> int:
    """How many steps of earlier rounds a round, or where it applied nothing the one after it, did again."""
    before = max((s.last_step for s in found if s.round < round_number), default=0)
    first = next((s.first_step for s in found if s.round >= round_number), before + 1)
    return max(0, before - first + 1)


def _times(losses: str) -> dict[int, list[float]]:
    """round -> when its steps were applied; a line cut off by a kill is passed over."""
    times: dict[int, list[float]] = collections.defaultdict(list)
    for line in losses.splitlines():
        try:
            record = json.loads(line)
            times[int(record["round"])].append(float(record["time"]))
        except (ValueError, KeyError, TypeError):
            continue
    return times


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
