"""After which steps the state is kept: as asked for, or as often as costs one percent at most; on all ranks alike."""

from __future__ import annotations

import pytest

from elastic.training.memory_policy import SLOTS, MemoryPolicy


def run(policies: list[MemoryPolicy], *, steps: int, cost: float, seconds: float, able: int) -> list[int]:
    """The steps that are kept; the first `able` ranks have memory. All ranks must decide alike."""
    kept = []
    for step in range(1, steps + 1):
        sums = [sum(parts) for parts in zip(*(policy.contribution() for policy in policies), strict=True)]
        assert len(sums) == SLOTS
        due = {policy.is_due(sums, len(policies)) for policy in policies}
        assert len(due) == 1
        for policy in policies:
            policy.stepped(seconds)
        if due.pop():
            kept.append(step)
            for rank, policy in enumerate(policies):
                policy.taken()
                if rank < able:
                    policy.kept(cost)
    return kept


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (0.0009, list(range(1, 31))),  # under one percent of a step of 0.1 s
        (0.0011, [1, 2, *range(3, 31, 2)]),
        (0.0055, [1, 2, 3, 9, 15, 21, 27]),
        (1.0, [1, 2, 3]),  # it has to be measured
    ],
)
@pytest.mark.parametrize("able", [1, 2, 3])
def test_automatic_interval_is_the_smallest_that_costs_less_than_one_percent(
    cost: float, expected: list[int], able: int
) -> None:
    assert run([MemoryPolicy(None) for _ in range(3)], steps=30, cost=cost, seconds=0.1, able=able) == expected


def test_interval_that_was_asked_for_is_kept_whatever_it_costs() -> None:
    assert run([MemoryPolicy(4) for _ in range(2)], steps=12, cost=9.0, seconds=0.1, able=2) == [4, 8, 12]


def test_first_keep_into_cold_memory_does_not_count_for_long() -> None:
    policy = MemoryPolicy(None)
    for cost in (0.5, 0.0001, 0.0001):
        policy.kept(cost)
        policy.stepped(0.1)
        policy.is_due(policy.contribution(), 1)
    assert policy.every == 1
