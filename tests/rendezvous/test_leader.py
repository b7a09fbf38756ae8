"""What a leader does next, by tables: what it sees on one side, its one act on the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.rendezvous.breaking import broken_by
from elastic.rendezvous.leader import Wait, Write, lead
from elastic.rendezvous.leader_view import LeaderView, Rules, Seen
from elastic.rendezvous.membership import Breakage
from elastic.rendezvous.round import Limits, Member, Node, Phase, Round

NOW = 1000.0
RULES = Rules(
    limits=Limits(min_nodes=2, max_nodes=3),
    last_call_seconds=5.0,
    settle_seconds=1.0,
    drain_grace_seconds=20.0,
    ttl_seconds=4.0,
    max_restarts=2,
    probation_window_seconds=60.0,
    probation_seconds=5.0,
)


def seen(name: str, *, since: float = NOW - 100, ready_since: float | None = NOW - 100, **fields: Any) -> Seen:
    node = Node(node_id=name, addr=f"host-{name}", slots=1, store_port=29, **{"join": 1, **fields})
    return Seen(node=dataclasses.replace(node, ready=ready_since is not None), since=since, ready_since=ready_since)


def formed(names: str = "ab", *, number: int = 4, phase: Phase = Phase.RUNNING, **fields: Any) -> Round:
    members = tuple(Member(node_id=name, join=1, slots=1) for name in names)
    return Round(**{"incarnation": "i", "cause": "c", **fields}, number=number, phase=phase, members=members)


def view(current: Round | None, *nodes: Seen, rules: Rules = RULES, **fields: Any) -> LeaderView:
    return LeaderView(
        **{"now": NOW, "ended_at": NOW, "new_incarnation": "new", **fields},
        round=current,
        nodes={one.node.node_id: one for one in nodes},
        rules=rules,
    )


def act(seen_by_it: LeaderView) -> tuple[str, str]:
    """The act in short: what becomes of the round and why, or for what time it waits."""
    done = lead(seen_by_it)
    if isinstance(done, Wait):
        return "wait", done.short or ("" if done.until is None else f"{done.until - NOW:g}")
    number = seen_by_it.round.number if seen_by_it.round is not None else 0
    if done.round.number == number:
        return done.round.phase.value, done.round.cause
    return "".join(member.node_id for member in done.round.members), done.round.cause


# Nobody of a last round is there.


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], ("wait", "")),
        ([seen("a")], ("wait", "1 of 2 nodes")),
        ([seen("a"), seen("b", since=NOW - 1)], ("wait", "4")),
        ([seen("a"), seen("b", since=NOW - 5)], ("ab", "started")),
        ([seen("a"), seen("b", since=NOW - 5, ready_since=None)], ("ab", "started")),
        ([seen("a", since=NOW), seen("b", since=NOW), seen("c", since=NOW)], ("abc", "started")),
        ([seen("a"), seen("b"), seen("c"), seen("d")], ("abc", "started")),
        ([seen("a"), seen("b", leaving=True)], ("wait", "1 of 2 nodes")),
        ([seen("a"), seen("b", settings="other")], ("wait", "1 of 2 nodes")),
    ],
)
def test_the_first_round_waits_for_min_then_for_the_last_call(nodes: list[Seen], expected: tuple[str, str]) -> None:
    assert act(view(None, *nodes)) == expected


def test_while_nodes_are_missing_that_is_what_is_told_of_those_that_are_there() -> None:
    alone = lead(view(None, seen("a", ready_since=None)))
    assert isinstance(alone, Wait)
    assert [waiting.reason for waiting in alone.waiting] == ["1 of 2 nodes are there"]
    newcomer = lead(view(formed("ab"), seen("a"), seen("b"), seen("c", ready_since=None)))
    assert isinstance(newcomer, Wait)
    assert [waiting.reason for waiting in newcomer.waiting] == ["it is getting ready"]


def test_the_first_round_is_numbered_above_all_that_its_nodes_know() -> None:
    done = lead(view(None, seen("a", first_number=3), seen("b", first_number=9), seen("c")))
    assert isinstance(done, Write)
    assert (done.round.number, done.round.incarnation) == (9, "new")
    assert (done.round.store_host, done.round.store_addr, done.round.store_port) == ("a", "host-a", 29)


@pytest.mark.parametrize(
    ("incarnation", "expected"),
    [("i", "i"), ("", "new")],
    ids=["a node of it lives", "all were started since"],
)
def test_an_incarnation_goes_on_as_long_as_one_node_of_it_lives(incarnation: str, expected: str) -> None:
    done = lead(view(formed("xy"), seen("a", incarnation=incarnation), seen("b")))
    assert isinstance(done, Write)
    assert (done.round.number, done.round.incarnation) == (5, expected)


def test_a_closed_job_is_followed_by_a_new_incarnation_of_those_started_since() -> None:
    closed = formed("ab", phase=Phase.CLOSED, outcome="succeeded")
    old = [seen("a", done=4), seen("b", done=3)]
    fresh = [seen("c"), seen("d"), seen("e", incarnation="i")]
    assert act(view(closed, *old, *fresh)) == ("wait", "28")  # b has not stopped its workers
    assert act(view(closed, old[0], seen("b", done=4), *fresh)) == ("cd", "started")
    assert act(view(closed, *old, *fresh, ended_at=NOW - 28)) == ("cd", "started")


# A round is running.


@pytest.mark.parametrize(
    ("nodes", "fields", "expected"),
    [
        ([seen("a"), seen("b")], {}, ("wait", "")),
        ([seen("a")], {}, ("broken", "node b lost")),
        ([seen("a"), seen("b", join=2)], {}, ("broken", "node b lost")),
        ([seen("a")], {"stopped": frozenset({("b", 1)})}, ("broken", "node b left")),
        ([seen("a")], {"finished": frozenset({("b", 1)})}, ("wait", "")),
        ([seen("a", done=4)], {"finished": frozenset({("b", 1)})}, ("closed", "all members are done")),
        ([seen("a", done=4), seen("b", done=4)], {}, ("closed", "all members are done")),
        ([seen("a", done=4), seen("b", done=3)], {}, ("wait", "")),
        ([seen("a"), seen("b", leaving=True)], {}, ("draining", "node b leaves")),
        ([seen("a"), seen("b", after=4)], {}, ("draining", "node b has stopped")),
    ],
)
def test_a_running_round_ends_when_a_member_does(
    nodes: list[Seen], fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert act(view(formed(), *nodes, **fields)) == expected


@pytest.mark.parametrize(
    ("newcomers", "expected"),
    [
        ([seen("c", ready_since=None)], ("wait", "")),
        ([seen("c", ready_since=NOW - 0.4)], ("wait", "0.6")),
        ([seen("c", ready_since=NOW - 1)], ("draining", "node c joins")),
        ([seen("c", ready_since=NOW - 2), seen("d", ready_since=NOW - 0.5)], ("wait", "0.5")),
        ([seen("c", ready_since=NOW - 5), seen("d", ready_since=NOW)], ("draining", "node c joins")),
        ([seen("c", settings="other")], ("wait", "")),
        ([seen("c", leaving=True)], ("wait", "")),
    ],
)
def test_newcomers_are_let_in_once_the_last_is_ready(newcomers: list[Seen], expected: tuple[str, str]) -> None:
    assert act(view(formed(), seen("a"), seen("b"), *newcomers)) == expected


def test_nobody_is_let_in_when_there_are_max_nodes_or_the_end_is_near() -> None:
    members = [seen("a"), seen("b"), seen("c")]
    full = lead(view(formed("abc"), *members, seen("d")))
    assert isinstance(full, Wait)
    assert "spare" in full.waiting[0].reason
    assert act(view(formed("ab"), seen("a", done=4), seen("b"), seen("d"))) == ("wait", "")


# It is over.


@pytest.mark.parametrize(
    ("nodes", "fields", "expected"),
    [
        ([seen("a", after=4), seen("b")], {}, ("wait", "28")),
        ([seen("a")], {}, ("broken", "node b lost")),
        ([seen("a")], {"stopped": frozenset({("b", 1)})}, ("wait", "28")),
        ([seen("a", done=4), seen("b", after=4)], {}, ("broken", "c; some members are done and some are not")),
        ([seen("a", done=4), seen("b", done=4)], {}, ("closed", "all members are done")),
        ([seen("a", after=4), seen("b", after=4), seen("c")], {}, ("abc", "c")),
        ([seen("a", after=4), seen("b", after=4), seen("c", ready_since=None)], {}, ("ab", "c")),
    ],
)
def test_a_drain_ends_when_all_have_stopped_and_breaks_when_one_is_lost(
    nodes: list[Seen], fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert act(view(formed(phase=Phase.DRAINING), *nodes, **fields)) == expected


def test_who_had_said_that_it_leaves_may_be_gone_before_the_others_have_drained() -> None:
    drained = formed(phase=Phase.DRAINING, leaving=("b",))
    assert act(view(drained, seen("a"))) == ("wait", "28")
    assert act(view(drained, seen("a"), seen("b", after=4, leaving=True))) == ("wait", "28")
    assert act(view(drained, seen("a", after=4), seen("b", after=4, leaving=True))) == ("wait", "1 of 2 nodes")


def test_who_says_during_the_drain_that_it_leaves_is_not_lost_to_the_next_leader() -> None:
    done = lead(view(formed("abc", phase=Phase.DRAINING, leaving=("c",)), seen("a"), seen("b", leaving=True)))
    assert isinstance(done, Write)
    assert (done.round.number, done.round.phase, done.round.leaving) == (4, Phase.DRAINING, ("c", "b"))
    assert act(view(done.round, seen("a"))) == ("wait", "28")


def test_a_leader_that_left_is_neither_lost_nor_flaky_to_the_next_one() -> None:
    drained = formed("abc", phase=Phase.DRAINING, leaving=("c",))
    done = lead(view(drained, seen("a", after=4), seen("b", after=4), let_in={("c", 1): NOW - 1}))
    assert isinstance(done, Write)
    assert (done.round.number, done.round.cause, done.round.flaky) == (5, "node c left", ())


def test_who_is_late_is_left_out_until_it_comes_anew() -> None:
    current = formed("abc", phase=Phase.BROKEN)
    nodes = [seen("a", after=4), seen("b", after=4), seen("c", after=3)]
    assert act(view(current, *nodes, ended_at=NOW - 27)) == ("wait", "1")
    following = lead(view(current, *nodes, ended_at=NOW - 28))
    assert isinstance(following, Write)
    assert [member.node_id for member in following.round.members] == ["a", "b"]
    assert following.round.late == (("c", 1),)
    assert act(view(following.round, *nodes)) == ("wait", "")  # its old join is no newcomer
    again = seen("c", join=7, after=4)
    assert act(view(following.round, nodes[0], nodes[1], again)) == ("draining", "node c joins")


@pytest.mark.parametrize(
    ("fields", "used", "nodes", "charge"),
    [
        ({"charged": True, "progressed": True}, 0, "ab", "c"),
        ({"charged": True, "progressed": True}, 1, "ab", "c"),
        ({"charged": False}, 2, "ab", ""),
        ({"charged": True, "progressed": True}, 2, "a", ""),  # b was lost: free
    ],
)
def test_a_failure_is_charged_with_the_round_that_answers_it(
    fields: dict[str, Any], used: int, nodes: str, charge: str
) -> None:
    rules = dataclasses.replace(RULES, limits=Limits(min_nodes=1, max_nodes=3))
    there = [seen(name, after=4) for name in nodes]
    done = lead(view(formed(phase=Phase.BROKEN, **fields), *there, used=used, rules=rules))
    assert isinstance(done, Write)
    assert (done.round.number, done.charge) == (5, charge)


def test_the_failure_that_the_budget_does_not_cover_closes_the_job() -> None:
    broken = formed(phase=Phase.BROKEN, charged=True, progressed=True)
    done = lead(view(broken, seen("a", after=4), seen("b", after=4), used=2))
    assert isinstance(done, Write)
    assert (done.round.number, done.round.phase, done.round.outcome) == (4, Phase.CLOSED, "failed")
    assert "--max-restarts is 2" in done.round.cause


def test_failures_without_progress_are_slowed_down_the_first_after_progress_is_not() -> None:
    nodes = [seen("a", after=4), seen("b", after=4)]
    for failures, longest in ((0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0)):
        broken = formed(phase=Phase.BROKEN, charged=True, failures=failures)
        done = lead(view(broken, *nodes))
        if not longest:
            assert isinstance(done, Write)
            assert done.round.failures == 1
        else:
            assert isinstance(done, Wait)
            assert done.until is not None
            assert longest / 2 <= done.until - NOW <= longest
            assert "back-off" in done.waiting[0].reason
            assert lead(view(broken, *nodes)) == done  # whoever leads


def test_a_lost_node_explains_what_looked_like_the_loss_of_a_peer() -> None:
    rules = dataclasses.replace(RULES, limits=Limits(min_nodes=1, max_nodes=3))
    for consequence, cause in ((True, "node b lost"), (False, "c")):
        broken = formed(phase=Phase.BROKEN, charged=True, consequence=consequence)
        assert act(view(broken, seen("a", after=4), rules=rules)) == ("a", cause)


def test_a_node_lost_soon_after_it_was_let_in_waits_longer_each_time() -> None:
    current = formed("abc", phase=Phase.BROKEN)
    members = [seen("a", after=4), seen("b", after=4)]
    for losses, pause in ((1, 5.0), (2, 10.0), (3, 20.0)):
        done = lead(view(current, *members, let_in={("c", 1): NOW - 59}))
        assert isinstance(done, Write)
        assert [(flaky.node_id, flaky.losses) for flaky in done.round.flaky] == [("c", losses)]
        again = seen("c", join=7, since=NOW - 1)
        running = dataclasses.replace(done.round, members=done.round.members)
        assert act(view(running, *members, again)) == ("wait", f"{pause - 1:g}")
        current = dataclasses.replace(current, flaky=done.round.flaky)
    stayed = lead(view(current, *members, seen("c", after=4), let_in={("c", 1): NOW - 61}))
    assert isinstance(stayed, Write)
    assert stayed.round.flaky == ()


# A member's word.


def breakage(cause: str, **fields: Any) -> Breakage:
    return Breakage(**{"charged": True, "progressed": False, **fields}, cause=cause)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([breakage("x")], ("x", True)),
        ([breakage("x"), breakage("y")], ("x", True)),
        ([breakage("x", consequence=True), breakage("y")], ("y", True)),
        ([breakage("x"), breakage("y", consequence=True)], ("x", True)),
        ([breakage("x", consequence=True), breakage("frozen", charged=False)], ("frozen", False)),
        ([breakage("frozen", charged=False), breakage("y", consequence=True)], ("frozen", False)),
        ([breakage("frozen", charged=False), breakage("y")], ("frozen", True)),
    ],
)
def test_the_cause_is_the_first_failure_that_is_no_consequence(
    told: list[Breakage], expected: tuple[str, bool]
) -> None:
    current = formed()
    for one in told:
        current = broken_by(current, one)
    assert (current.phase, current.cause, current.charged) == (Phase.BROKEN, *expected)


def test_a_fatal_failure_closes_the_round_and_nothing_changes_it_any_more() -> None:
    closed = broken_by(broken_by(formed(), breakage("x")), breakage("bad flag", fatal=True, exit_code=78))
    assert (closed.phase, closed.outcome, closed.exit_code, closed.cause) == (Phase.CLOSED, "failed", 78, "bad flag")
    assert broken_by(closed, breakage("y")) is closed
