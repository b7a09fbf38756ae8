"""The order of samples: a permutation of every epoch, random enough, cheap to enter anywhere."""

from __future__ import annotations

import collections
import itertools
import time

import pytest

from elastic.training.sampler import EpochOrder, Sampler


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 63, 64, 65, 99, 100, 101, 255, 257, 4095, 10_007])
def test_every_epoch_is_a_permutation(size: int) -> None:
    for epoch in range(3):
        assert sorted(EpochOrder(size=size, seed=5, epoch=epoch).indices(0, size)) == list(range(size))


def test_small_datasets_see_all_their_orders_about_equally_often() -> None:
    """Chi-squared over the 24 orders of four items; 60 is far beyond the 0.9999 quantile (57.1) of 23 degrees."""
    trials = 4800
    seen = collections.Counter(tuple(EpochOrder(size=4, seed=1, epoch=epoch).indices(0, 4)) for epoch in range(trials))
    assert set(seen) == set(itertools.permutations(range(4)))
    expected = trials / 24
    assert sum((n - expected) ** 2 / expected for n in seen.values()) < 60


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    order = EpochOrder(size=100_000, seed=3, epoch=0).indices(0, 100_000)
    close = sum(abs(a - b) <= 100 for a, b in itertools.pairwise(order))
    assert close < 400  # about 200 by chance
    halves = sum(i < 50_000 for i in order[:50_000])
    assert abs(halves - 25_000) < 600  # 5 sigma of a hypergeometric draw


def test_seed_and_epoch_change_the_order() -> None:
    orders = {
        tuple(EpochOrder(size=50, seed=seed, epoch=epoch).indices(0, 50)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_of_this_version_is_that_of_every_version() -> None:
    """A checkpoint's position counts in it: a change would lose and repeat samples of jobs that are resumed."""
    assert EpochOrder(size=20, seed=7, epoch=2).indices(0, 20) == [
        19,
        7,
        2,
        11,
        4,
        3,
        13,
        17,
        9,
        6,
        10,
        0,
        14,
        12,
        1,
        16,
        15,
        8,
        5,
        18,
    ]


def test_blocks_read_the_same_order_as_a_whole() -> None:
    size = 10_000
    whole = [EpochOrder(size=size, seed=2, epoch=epoch).indices(0, size) for epoch in range(2)]
    sampler = Sampler(size=size, seed=2)
    for epoch, start, stop in [(0, 0, 7), (0, 7, 9000), (0, 9000, 10_000), (1, 5, 6), (0, 4090, 4100), (1, 0, 10_000)]:
        assert sampler.indices(epoch, start, stop) == whole[epoch][start:stop]


def test_the_end_of_a_huge_dataset_costs_no_more_than_its_beginning() -> None:
    size = 1 << 50
    began = time.perf_counter()
    indices = EpochOrder(size=size, seed=0, epoch=0).indices(size - 1000, size)
    assert time.perf_counter() - began < 1.0
    assert len(set(indices)) == 1000
    assert all(0 <= i < size for i in indices)


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert Sampler(size=9, seed=1, shuffle=False).indices(3, 2, 7) == [2, 3, 4, 5, 6]
