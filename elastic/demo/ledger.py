"""Pure: reads the ledger of a run and says which samples were used, lost and doubled.

A step that was interrupted is repeated after the restore, so the ledger may show it in several rounds. What counts is
the last round that applied it: what earlier rounds made of it was thrown away with their state.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from elastic.training.batching import Batching, Position
from elastic.training.sampler import Sampler

Sample = tuple[int, int]  # (epoch, index in the dataset)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one rank contributed to one step in one round.

    A closing line is what another round wrote for ranks that could not (see `unwritten`): its rank is any that has no
    line of its own.
    """

    round: int
    step: int
    epoch: int
    rank: int
    samples: tuple[int, ...]
    closed_by: int | None = None  # that round; None = the rank's own line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The entries of a file, in its order, and how many pieces of it were no entry (a write that a kill cut off)."""

    entries: tuple[Entry, ...]
    torn: int = 0

    @property
    def last_step(self) -> int:
        """The highest step that any rank has applied; 0 = none."""
        return max((entry.step for entry in self.entries), default=0)


def read_ledger(text: str) -> Ledger:
    """Parse a ledger. An entry that follows a cut one on the same line is found."""
    entries, torn = [], 0
    for piece in re.split(r'\n|(?=\{"round":)', text):
        if not piece.strip():
            continue
        try:
            raw = json.loads(piece)
            entries.append(
                Entry(
                    round=int(raw["round"]),
                    step=int(raw["step"]),
                    epoch=int(raw["epoch"]),
                    rank=int(raw["rank"]),
                    samples=tuple(int(index) for index in raw["samples"]),
                    closed_by=int(raw["closed_by"]) if "closed_by" in raw else None,
                )
            )
        except (ValueError, KeyError, TypeError):
            torn += 1
    return Ledger(entries=tuple(entries), torn=torn)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A ledger compared with the plan. Samples count once per epoch: an epoch uses each again."""

    steps: int  # of the plan
    expected: int  # samples the plan uses
    used: int  # samples that went into the state at the end
    lost: int  # planned and not used
    doubled: int  # used more often than planned
    strange: int  # used, and never planned
    wrong_steps: tuple[int, ...]  # steps that did not use exactly the samples planned for them
    repeated_steps: tuple[int, ...]  # steps that were applied in more than one round

    @property
    def is_right(self) -> bool:
        """Every sample of the plan was used once, in its step, and nothing else was."""
        return not (self.lost or self.doubled or self.strange or self.wrong_steps)


def planned_steps(
    *, samples: int, global_batch: int, micro_batch: int, seed: int, steps: int, first: int = 1
) -> dict[int, tuple[Sample, ...]]:
    """What the Trainer must use: step -> its samples, for the steps from `first` to `steps`."""
    batching = Batching(dataset_size=samples, global_batch_size=global_batch, micro_batch_size=micro_batch)
    sampler = Sampler(size=samples, seed=seed)
    return {
        step: tuple((plan.epoch, index) for index in sampler.indices(plan.epoch, plan.start, plan.stop))
        for step, plan in enumerate(batching.remaining(Position(), step=0, steps=steps), start=1)
        if step >= first
    }


def unwritten(
    entries: Iterable[Entry], plan: Mapping[int, Sequence[Sample]], *, closed_by: int = 0
) -> tuple[Entry, ...]:
    """What ranks put into steps that training goes on from, and were killed before they could write down.

    An update needs the gradients of all, so whoever wrote a step proves that all had given their part. Another node
    may have kept the step meanwhile: then nobody does it again, and its next round, `closed_by`, closes the books.

    A rank that is killed ends its round: only a round's last step may be incomplete, and the one before it is complete.
    Else the file is not one that all nodes write to.
    """
    entries = tuple(entries)
    rounds, found = _by_round(entries), []
    ends: dict[int, int] = {}
    for entry in entries:
        ends[entry.round] = max(entry.step, ends.get(entry.round, 0))
    for step in sorted(plan.keys() & rounds.keys()):
        last, missing = max(rounds[step]), _missing(rounds[step], plan[step])
        is_known = step == 1 or (step - 1 in plan and not _missing(rounds.get(step - 1, {}), plan[step - 1]))
        if missing and is_known and ends[last] == step:
            found.append(_closing(rounds[step][last], missing, closed_by))
            rounds[step][last].append(found[-1])
    return tuple(found)


def _closing(written: Sequence[Entry], missing: Sequence[Sample], closed_by: int) -> Entry:
    """The line about what of a step nobody has written."""
    ranks = {entry.rank for entry in written}
    (epoch,) = {epoch for epoch, _ in missing}
    return Entry(
        round=written[0].round,
        step=written[0].step,
        epoch=epoch,
        rank=next(rank for rank in itertools.count() if rank not in ranks),
        samples=tuple(index for _, index in missing),
        closed_by=closed_by,
    )


def _missing(by_round: Mapping[int, Sequence[Entry]], planned: Sequence[Sample]) -> list[Sample]:
    """The planned samples of a step that its last round has no line about."""
    last = by_round[max(by_round)] if by_round else ()
    written = {(entry.epoch, index) for entry in last for index in entry.samples}
    return [sample for sample in planned if sample not in written]


def _used(entries: Sequence[Entry]) -> list[Sample]:
    """What a step used in a round. A closing line counts for what no rank has written itself.

    A rank may have been frozen instead of killed, and write its line after all, or into another file.
    """
    written = [(entry.epoch, index) for entry in entries if entry.closed_by is None for index in entry.samples]
    closed = {(entry.epoch, index) for entry in entries if entry.closed_by is not None for index in entry.samples}
    return [*written, *closed.difference(written)]


def _by_round(entries: Iterable[Entry]) -> dict[int, dict[int, list[Entry]]]:
    """Step -> round -> what was written about it then."""
    rounds: dict[int, dict[int, list[Entry]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for entry in entries:
        rounds[entry.step][entry.round].append(entry)
    return rounds


def audit(entries: Iterable[Entry], plan: Mapping[int, Sequence[Sample]]) -> Audit:
    """Compare what was used with what was planned. Two entries of one rank for one step and round both count."""
    rounds = _by_round(entries)
    counted = {step: _used(by_round[max(by_round)]) for step, by_round in rounds.items()}
    expected = collections.Counter(sample for samples in plan.values() for sample in samples)
    used = collections.Counter(sample for samples in counted.values() for sample in samples)
    surplus = used - expected
    return Audit(
        steps=len(plan),
        expected=expected.total(),
        used=used.total(),
        lost=(expected - used).total(),
        doubled=sum(count for sample, count in surplus.items() if sample in expected),
        strange=sum(count for sample, count in surplus.items() if sample not in expected),
        wrong_steps=tuple(
            step
            for step in sorted(plan.keys() | counted)
            if sorted(plan.get(step, ())) != sorted(counted.get(step, ()))
        ),
        repeated_steps=tuple(sorted(step for step, by_round in rounds.items() if len(by_round) > 1)),
    )
