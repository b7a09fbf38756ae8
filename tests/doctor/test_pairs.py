"""Which pairs are measured when, and what is made of the figures: tables, without processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from elastic.checks.pairs import Pair, judge, merged, tournament

NAMES = {0: "n0", 1: "n1", 2: "n2", 3: "n3"}


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_each_pair_meets_once_and_no_node_is_in_two_pairs_at_a_time(nodes: int) -> None:
    met: list[tuple[int, int]] = []
    for partners in tournament(nodes):
        assert all(partners[partner] == node for node, partner in partners.items())
        met += [(node, partner) for node, partner in partners.items() if node < partner]
    assert sorted(met) == list(itertools.combinations(range(nodes), 2))


def mesh(**changes: Any) -> list[Pair]:
    """Four nodes, a gigabyte a second each, but for `_0_1=...`."""
    found = []
    for left, right in itertools.combinations(NAMES, 2):
        found.append(Pair(left=left, right=right, **{"bytes_per_second": 1e9, **changes.get(f"_{left}_{right}", {})}))
    return found


def test_a_healthy_mesh_has_a_line_for_each_pair() -> None:
    found = list(judge(mesh(), NAMES))
    assert [finding.state for finding in found] == ["ok"] * 6
    assert "n0 - n1: 1.00 GB/s" in found[0].message


def test_a_slow_pair_is_a_warning_that_names_both_nodes() -> None:
    bad = [f for f in judge(mesh(_1_2={"bytes_per_second": 2e8}), NAMES) if f.state != "ok"]
    assert [f.state for f in bad] == ["warning"]
    assert "n1 - n2: 0.20 GB/s" in bad[0].message
    assert "the better quarter of the pairs reaches 1.00 GB/s" in bad[0].message


def test_a_broken_pair_is_an_error_that_names_both_nodes() -> None:
    bad = [f for f in judge(mesh(_0_3={"failure": "timed out"}), NAMES) if f.state != "ok"]
    assert [(f.state, f.message) for f in bad] == [("error", "n0 - n3: timed out")]


@pytest.mark.parametrize("how", [{"failure": "timed out"}, {"bytes_per_second": 1e8}])
def test_a_node_that_is_in_every_bad_pair_is_blamed(how: dict[str, Any]) -> None:
    found = list(judge(mesh(_0_2=how, _1_2=how, _2_3=how), NAMES))
    blamed = [f for f in found if f.check == "node"]
    assert len(blamed) == 1
    assert "node n2" in blamed[0].message


def test_one_slow_node_of_three_is_blamed() -> None:
    rates = {(0, 1): 1e9, (0, 2): 1e8, (1, 2): 1e8}
    pairs = [Pair(left=left, right=right, bytes_per_second=rate) for (left, right), rate in rates.items()]
    found = list(judge(pairs, {0: "n0", 1: "n1", 2: "n2"}))
    assert [finding.state for finding in found] == ["warning", "warning", "warning", "ok"]
    assert "every pair is slow of node n2" in found[2].message


def test_many_pairs_are_summed_up_and_the_bad_ones_are_still_named() -> None:
    names = {rank: f"n{rank}" for rank in range(16)}
    pairs = [Pair(left=a, right=b, bytes_per_second=1e9) for a, b in itertools.combinations(names, 2)]
    pairs[7] = Pair(left=pairs[7].left, right=pairs[7].right, bytes_per_second=1e8)
    found = list(judge(pairs, names))
    assert [(f.check, f.state) for f in found] == [("pair", "warning"), ("pairs", "ok")]
    assert "120 pairs measured, 1 slow" in found[1].message


def test_nobody_is_blamed_where_nothing_works() -> None:
    how = {"failure": "timed out"}
    found = list(judge(mesh(**{f"_{a}_{b}": how for a, b in itertools.combinations(NAMES, 2)}), NAMES))
    assert {finding.check for finding in found} == {"pair"}


def test_of_two_reports_the_failure_counts_else_the_slower() -> None:
    fast, slow = (Pair(left=0, right=1, bytes_per_second=rate) for rate in (2e9, 1e9))
    failed = Pair(left=0, right=1, failure="gone")
    assert merged([fast, slow]) == merged([slow, fast]) == [slow]
    assert merged([failed, slow]) == merged([slow, failed]) == [failed]


def test_a_pair_survives_the_way_through_the_store() -> None:
    pair = Pair(left=0, right=1, bytes_per_second=1.5, failure="x")
    assert Pair.from_json(pair.to_json().encode()) == pair
    with pytest.raises(ValueError, match="not a measured pair"):
        Pair.from_json('{"left": 0}')
