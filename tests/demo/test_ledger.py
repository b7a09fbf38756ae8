"""What a ledger says of the samples, by tables."""

from __future__ import annotations

import dataclasses
import json

import pytest

from elastic.demo.ledger import Entry, audit, planned_steps, read_ledger, unwritten

PLAN = {1: ((0, 0), (0, 1)), 2: ((0, 2), (0, 3)), 3: ((1, 1), (1, 0))}  # two steps of epoch 0, one of epoch 1


def entry(round_number: int, step: int, epoch: int, rank: int, *samples: int) -> Entry:
    return Entry(round=round_number, step=step, epoch=epoch, rank=rank, samples=samples)


def closing(closed_by: int, *fields: int) -> Entry:
    return dataclasses.replace(entry(*fields), closed_by=closed_by)


WHOLE = [
    *(entry(1, 1, 0, 0, 0), entry(1, 1, 0, 1, 1)),
    *(entry(1, 2, 0, 0, 2), entry(1, 2, 0, 1, 3)),
    *(entry(1, 3, 1, 0, 1), entry(1, 3, 1, 1, 0)),
]


def line(found: Entry) -> str:
    fields = {"round": found.round, "step": found.step, "epoch": found.epoch, "rank": found.rank}
    closed_by = {} if found.closed_by is None else {"closed_by": found.closed_by}
    return json.dumps({**fields, "samples": list(found.samples), **closed_by}, separators=(",", ":")) + "\n"


@pytest.mark.parametrize(
    ("entries", "used", "lost", "doubled", "strange", "wrong", "repeated"),
    [
        pytest.param(WHOLE, 6, 0, 0, 0, (), (), id="undisturbed"),
        pytest.param([*WHOLE[:4], *WHOLE[2:]], 8, 0, 2, 0, (2,), (), id="a step twice in one round"),
        pytest.param(
            [*WHOLE[:4], entry(2, 2, 0, 0, 2, 3), entry(2, 3, 1, 0, 0, 1)], 6, 0, 0, 0, (), (2,), id="a step repeated"
        ),
        pytest.param(
            [*WHOLE[:3], entry(2, 2, 0, 0, 2, 3), *WHOLE[4:]], 6, 0, 0, 0, (), (2,), id="only one rank had applied it"
        ),
        pytest.param([*WHOLE[:3], *WHOLE[4:]], 5, 1, 0, 0, (2,), (), id="a rank's share is missing"),
        pytest.param(WHOLE[:4], 4, 2, 0, 0, (3,), (), id="it ended too early"),
        pytest.param([*WHOLE, entry(1, 4, 1, 0, 0)], 7, 0, 1, 0, (4,), (), id="it went on too long"),
        pytest.param([*WHOLE[:4], entry(1, 3, 0, 0, 1, 0)], 6, 2, 2, 0, (3,), (), id="of the wrong epoch"),
        pytest.param([*WHOLE[:5], entry(1, 3, 1, 1, 9)], 6, 1, 0, 1, (3,), (), id="never planned"),
        pytest.param(
            [entry(1, 1, 0, 0, 2, 3), entry(1, 2, 0, 0, 0, 1), *WHOLE[4:]],
            6,
            0,
            0,
            0,
            (1, 2),
            (),
            id="in another order",
        ),
        pytest.param([*WHOLE, entry(1, 3, 1, 2)], 6, 0, 0, 0, (), (), id="a rank without a share"),
        pytest.param([*WHOLE[:5], closing(2, 1, 3, 1, 1, 0)], 6, 0, 0, 0, (), (), id="closed for a rank that is lost"),
        pytest.param([*WHOLE, closing(2, 1, 3, 1, 1, 0)], 6, 0, 0, 0, (), (), id="closed for a rank that thawed"),
        pytest.param(
            [*WHOLE[:5], closing(2, 1, 3, 1, 1, 0), closing(3, 1, 3, 1, 1, 0)], 6, 0, 0, 0, (), (), id="closed twice"
        ),
        pytest.param(
            [*WHOLE, WHOLE[5], closing(2, 1, 3, 1, 1, 0)], 7, 0, 1, 0, (3,), (), id="closed, and written twice"
        ),
        pytest.param([*WHOLE, closing(2, 1, 3, 1, 1, 9)], 7, 0, 0, 1, (3,), (), id="closed with what was not planned"),
        pytest.param([], 0, 6, 0, 0, (1, 2, 3), (), id="empty"),
    ],
)
def test_samples_are_counted_once_per_epoch_in_the_last_round_of_each_step(
    entries: list[Entry],
    used: int,
    lost: int,
    doubled: int,
    strange: int,
    wrong: tuple[int, ...],
    repeated: tuple[int, ...],
) -> None:
    found = audit(entries, PLAN)
    assert (found.steps, found.expected) == (3, 6)
    assert (found.used, found.lost, found.doubled, found.strange) == (used, lost, doubled, strange)
    assert (found.wrong_steps, found.repeated_steps) == (wrong, repeated)
    assert found.is_right == (not wrong)


def test_a_closing_line_is_read_as_one() -> None:
    assert read_ledger(line(closing(2, 1, 3, 1, 1, 0))).entries == (closing(2, 1, 3, 1, 1, 0),)


def test_lines_become_entries_whatever_order_the_ranks_wrote_them_in() -> None:
    ledger = read_ledger("".join(map(line, reversed(WHOLE))))
    assert list(reversed(ledger.entries)) == WHOLE
    assert (ledger.torn, ledger.last_step) == (0, 3)


@pytest.mark.parametrize("kept", [1, 9, 40])
def test_a_cut_last_line_is_passed_over(kept: int) -> None:
    ledger = read_ledger(line(WHOLE[0]) + line(WHOLE[1])[:kept])
    assert (ledger.entries, ledger.torn) == ((WHOLE[0],), 1)


def test_the_line_after_a_cut_one_is_found() -> None:
    ledger = read_ledger(line(WHOLE[0])[:30] + line(WHOLE[1]) + line(WHOLE[2]))
    assert (ledger.entries, ledger.torn) == ((WHOLE[1], WHOLE[2]), 1)


@pytest.mark.parametrize("text", ["{}", "[1]", "null", '{"round":1,"step":1}', '{"round":1,"samples":3}', "\0\0"])
def test_what_is_no_entry_is_counted_as_torn(text: str) -> None:
    assert read_ledger(text + "\n").torn == 1


def test_the_plan_uses_each_sample_once_per_epoch_and_a_smaller_batch_at_its_end() -> None:
    plan = planned_steps(samples=7, global_batch=3, micro_batch=1, seed=5, steps=4)
    assert [len(plan[step]) for step in (1, 2, 3, 4)] == [3, 3, 1, 3]
    assert sorted(plan[1] + plan[2] + plan[3]) == [(0, index) for index in range(7)]
    assert {epoch for epoch, _ in plan[4]} == {1}


def test_a_plan_may_begin_at_any_step() -> None:
    facts = {"samples": 7, "global_batch": 3, "micro_batch": 1, "seed": 5, "steps": 4}
    whole = planned_steps(**facts)
    assert planned_steps(**facts, first=3) == {step: whole[step] for step in (3, 4)}


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        pytest.param(WHOLE, [], id="nothing is missing"),
        pytest.param(WHOLE[:3], [entry(1, 2, 0, 1, 3)], id="rank 1 was killed"),
        pytest.param([*WHOLE[:2], WHOLE[3]], [entry(1, 2, 0, 0, 2)], id="rank 0 was killed"),
        pytest.param(WHOLE[:1], [entry(1, 1, 0, 1, 1)], id="in the first step"),
        pytest.param(WHOLE[:5], [entry(1, 3, 1, 1, 0)], id="in the last step"),
        pytest.param(
            [*WHOLE[:3], entry(2, 3, 1, 0, 1, 0)], [entry(1, 2, 0, 1, 3)], id="another round has gone on meanwhile"
        ),
        pytest.param(
            [*WHOLE[:3], entry(2, 3, 1, 1, 0)], [entry(1, 2, 0, 1, 3), entry(2, 3, 1, 0, 1)], id="in two rounds"
        ),
        pytest.param([*WHOLE[:4], entry(2, 2, 0, 0, 2)], [entry(2, 2, 0, 1, 3)], id="the last round of a step counts"),
        pytest.param([*WHOLE[:2], *WHOLE[4:]], [], id="nobody wrote the step"),
        pytest.param(WHOLE[::2], [], id="a file of one rank alone"),
        pytest.param([*WHOLE[:3], *WHOLE[4:]], [], id="its round went on: it was not killed there"),
        pytest.param([], [], id="empty"),
    ],
)
def test_what_a_killed_rank_put_into_a_step_that_was_kept_is_found(entries: list[Entry], found: list[Entry]) -> None:
    assert unwritten(entries, PLAN, closed_by=7) == tuple(dataclasses.replace(one, closed_by=7) for one in found)
    assert unwritten([*entries, *unwritten(entries, PLAN)], PLAN) == ()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("steps_of_a_round", "closed"), [(10, 0), (5, 0), (1, 10)])
def test_a_file_of_one_node_that_was_closed_up_is_right_together_with_the_others(
    ranks: int, steps_of_a_round: int, closed: int
) -> None:
    """One node alone did ten steps; then all of them did ten more, each with a file of its own."""
    plan = planned_steps(samples=120, global_batch=6, micro_batch=1, seed=3, steps=20)

    def of_rank(rank: int, step: int) -> Entry:
        share = plan[step][rank * 6 // ranks : (rank + 1) * 6 // ranks]
        return entry(2 + (step - 11) // steps_of_a_round, step, 0, rank, *(index for _, index in share))

    alone = [entry(1, step, 0, 0, *(index for _, index in plan[step])) for step in range(1, 11)]
    first, *others = ([of_rank(rank, step) for step in range(11, 21)] for rank in range(ranks))
    made_up = unwritten([*alone, *first], plan)
    assert len(made_up) == closed
    found = audit([*alone, *first, *made_up, *(one for file in others for one in file)], plan)
    assert found.is_right, found
