"""Rounds are decided by pure functions: tables and random histories, no processes and no clocks."""

from __future__ import annotations

import random

import pytest

from elastic.rendezvous.round import (
    Budget,
    Limits,
    Member,
    Node,
    Phase,
    Round,
    advance,
    all_stopped,
    backoff_seconds,
    next_round,
    seat,
)


def node(name: str, *, join: int = 1, after: int = 0, slots: int = 1) -> Node:
    return Node(node_id=name, addr="h", slots=slots, join=join, after=after)


def member(name: str, *, join: int = 1, slots: int = 1) -> Member:
    return Member(node_id=name, join=join, slots=slots)


def formed(number: int, *members: Member, phase: Phase = Phase.RUNNING) -> Round:
    return Round(number=number, incarnation="i", phase=phase, cause="", members=members)


def test_ranks_are_contiguous_in_the_order_of_members() -> None:
    current = formed(1, member("a", slots=2), member("b", slots=3))
    assert (list(current.ranks("a")), list(current.ranks("b"))) == ([0, 1], [2, 3, 4])
    assert current.world_size == 5
    assert list(current.ranks("stranger")) == []
    assert current.node_rank("stranger") is None


def test_a_round_survives_json() -> None:
    current = formed(7, member("a", slots=2), phase=Phase.BROKEN)
    assert Round.from_json(current.to_json()) == current


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"members": 3}', '{"number": 1, "members": [], "phase": "sideways"}', "[" * 100_000),
        formed(7, member("a")).to_json().replace('"number":7', '"number":"7"'),
        formed(7, member("a"), member("b", slots="2")).to_json(),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_a_round_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Round.from_json(text)


@pytest.mark.parametrize("before", list(Phase))
@pytest.mark.parametrize("after", list(Phase))
def test_the_phase_only_moves_right_and_the_first_cause_stands(before: Phase, after: Phase) -> None:
    current = formed(1, member("a"), phase=before)
    moved = advance(current, after, "news")
    order = list(Phase)
    assert moved.phase == max(before, after, key=order.index)
    assert (moved is current) == (order.index(after) <= order.index(before))


@pytest.mark.parametrize(
    ("previous", "there", "limit", "expected"),
    [
        ("", "ba", 3, "ab"),
        ("abc", "abc", 3, "abc"),
        ("abc", "ac", 3, "ac"),
        ("abc", "bc", 3, "cb"),  # b keeps rank 1, c has lost its rank and fills the hole
        ("abc", "abcd", 3, "abc"),  # who is there stays, d is a spare
        ("abc", "acd", 3, "adc"),  # the newcomer takes the lost node's rank
        ("ab", "abcd", 4, "abcd"),
        ("abcd", "d", 4, "d"),
    ],
)
def test_survivors_keep_their_rank_where_it_still_exists(previous: str, there: str, limit: int, expected: str) -> None:
    members = seat([member(name) for name in previous], [node(name) for name in there], limit)
    assert "".join(m.node_id for m in members) == expected


def test_the_next_round_waits_for_every_member_that_still_has_workers() -> None:
    current = formed(4, member("a"), member("b"))
    nodes = {"a": node("a", after=4), "b": node("b", after=3)}
    limits = Limits(min_nodes=1, max_nodes=2)
    assert next_round(current, nodes, limits, incarnation="i", first_number=1, cause="x") is None
    nodes["b"] = node("b", after=4)
    following = next_round(current, nodes, limits, incarnation="i", first_number=1, cause="x")
    assert following is not None
    assert (following.number, following.phase) == (5, Phase.RUNNING)


def test_a_member_that_is_gone_or_has_come_back_anew_does_not_hold_up_the_round() -> None:
    current = formed(4, member("a"), member("b"))
    assert all_stopped(current, {"a": node("a", after=4)})
    assert all_stopped(current, {"a": node("a", after=4), "b": node("b", join=2)})


def test_too_few_nodes_or_a_closed_incarnation_give_no_round() -> None:
    limits = Limits(min_nodes=2, max_nodes=2)
    assert next_round(None, {"a": node("a")}, limits, incarnation="i", first_number=1, cause="") is None
    closed = formed(4, member("a"), phase=Phase.CLOSED)
    one = Limits(min_nodes=1, max_nodes=2)
    assert next_round(closed, {"a": node("a", after=4)}, one, incarnation="i", first_number=1, cause="") is None
    assert next_round(closed, {"a": node("a", after=4)}, one, incarnation="j", first_number=1, cause="") is not None


def test_the_first_round_is_above_everything_that_was_ever_numbered() -> None:
    first = next_round(
        None, {"a": node("a")}, Limits(min_nodes=1, max_nodes=1), incarnation="i", first_number=9, cause="started"
    )
    assert first is not None
    assert first.number == 9


def test_random_histories_keep_the_invariants() -> None:
    """Joins, losses and returns in any order: numbers grow, nobody is seated twice, who stays keeps its rank."""
    for seed in range(300):
        draw = random.Random(seed)
        limits = Limits(min_nodes=draw.randint(1, 2), max_nodes=draw.randint(2, 5))
        nodes: dict[str, Node] = {}
        joins: dict[str, int] = {}
        current: Round | None = None
        for _ in range(60):
            name = draw.choice("abcdefg")
            if name in nodes and draw.random() < 0.5:
                del nodes[name]
            elif name not in nodes:
                joins[name] = joins.get(name, 0) + 1
                nodes[name] = node(name, join=joins[name])
            elif current is not None:
                nodes[name] = node(name, join=joins[name], after=current.number)
            following = next_round(current, nodes, limits, incarnation="i", first_number=1, cause="")
            if following is None:
                continue
            names = [m.node_id for m in following.members]
            assert len(set(names)) == len(names) <= limits.max_nodes
            assert len(names) >= limits.min_nodes
            assert all(nodes[m.node_id].join == m.join for m in following.members)
            if current is not None:
                assert following.number == current.number + 1
                assert all_stopped(current, nodes)
                for rank, old in enumerate(current.members):
                    if old.node_id in names and rank < len(names):
                        assert names[rank] == old.node_id
            current = following


def test_the_budget_is_a_rolling_window() -> None:
    budget = Budget(limit=2, window_seconds=10.0)
    for now in (0.0, 1.0):
        budget = budget.charge(now)
    assert (budget.used(1.0), budget.is_spent(1.0)) == (2, False)
    assert budget.charge(2.0).is_spent(2.0)
    assert budget.used(10.5) == 1
    assert not budget.charge(10.5).is_spent(10.5)


def test_no_restarts_means_that_the_first_failure_ends_the_job() -> None:
    assert Budget(limit=0, window_seconds=10.0).charge(0.0).is_spent(0.0)


def test_back_off_is_nothing_after_progress_then_doubles_within_bounds() -> None:
    assert backoff_seconds(0, 0.9) == 0.0
    for count in range(1, 40):
        low, high = backoff_seconds(count, 0.0), backoff_seconds(count, 1.0)
        assert high == min(30.0, 0.5 * 2.0 ** (count - 1))
        assert low == high / 2
