"""The cut of a dataset into steps and micro-batches, by table."""

from __future__ import annotations

import itertools

import pytest

from elastic.training.batching import Batching, Position, cut, deal

SIZES = [1, 2, 3, 7, 8, 9, 16, 17, 63, 64, 65]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_pieces_are_as_few_as_possible_and_even(count: int, size: int) -> None:
    pieces = cut(count, size)
    lengths = [b - a for a, b in pieces]
    assert [a for a, _ in pieces] == [0, *itertools.accumulate(lengths)][:-1]
    assert sum(lengths) == count
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert len(pieces) == -(-count // size)


@pytest.mark.parametrize("count", [0, *SIZES])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100])
def test_ranks_get_contiguous_shares_that_differ_by_at_most_one(count: int, world_size: int) -> None:
    shares = [deal(count, rank, world_size) for rank in range(world_size)]
    assert [i for a, b in shares for i in range(a, b)] == list(range(count))
    lengths = [b - a for a, b in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_uses_each_position_once_and_leaks_nothing_into_the_next(size: int, drop_last: bool) -> None:
    batching = Batching(dataset_size=size, global_batch_size=8, micro_batch_size=3, drop_last=drop_last)
    if batching.steps_per_epoch == 0:
        return
    plans = list(batching.remaining(Position(), step=0, epochs=3))
    assert len(plans) == 3 * batching.steps_per_epoch
    for epoch in range(3):
        used = [i for p in plans if p.epoch == epoch for m in p.micro_batches for i in range(m.start, m.stop)]
        assert used == list(range(size - size % 8 if drop_last else size))
    assert plans[-1].after.samples == sum(p.stop - p.start for p in plans)
    assert plans[-1].after == Position(epoch=3, offset=0, samples=plans[-1].after.samples)


def test_micro_batches_of_a_step_do_not_depend_on_the_world_size() -> None:
    plan = Batching(dataset_size=100, global_batch_size=30, micro_batch_size=4).plan(Position())
    for world_size in (1, 2, 3, 5, 8, 20):
        deals = [deal(len(plan.micro_batches), rank, world_size) for rank in range(world_size)]
        dealt = [m for start, stop in deals for m in plan.micro_batches[start:stop]]
        assert tuple(dealt) == plan.micro_batches


def test_another_global_batch_goes_on_at_the_same_item() -> None:
    first = Batching(dataset_size=100, global_batch_size=30, micro_batch_size=4).plan(Position())
    second = Batching(dataset_size=100, global_batch_size=64, micro_batch_size=8).plan(first.after)
    assert (second.start, second.stop) == (30, 94)


def test_with_drop_last_a_rest_that_another_batch_size_left_is_skipped_over() -> None:
    plan = Batching(dataset_size=10, global_batch_size=8, micro_batch_size=8, drop_last=True).plan(
        Position(epoch=0, offset=5, samples=5)
    )
    assert (plan.epoch, plan.start, plan.stop, plan.after.samples) == (1, 0, 8, 13)


def test_steps_end_training_in_the_middle_of_an_epoch_and_count_from_those_done() -> None:
    batching = Batching(dataset_size=100, global_batch_size=10, micro_batch_size=4)
    assert len(list(batching.remaining(Position(), step=0, steps=13))) == 13
    assert len(list(batching.remaining(Position(epoch=1, offset=20, samples=120), step=12, steps=13))) == 1
    assert list(batching.remaining(Position(), step=13, steps=13)) == []
