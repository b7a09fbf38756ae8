"""One node's membership: the contract of an agent, on a clock the test moves."""

from __future__ import annotations

from elastic.rendezvous.membership import Breakage
from elastic.rendezvous.round import Budget, Node, Phase
from elastic.rendezvous.standalone import Standalone


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(limit: int = 3, window: float = 600.0) -> tuple[Standalone, Clock]:
    clock = Clock()
    membership = Standalone(
        node=Node(node_id="n", addr="127.0.0.1", slots=2),
        incarnation="i",
        first_number=5,
        budget=Budget(limit=limit, window_seconds=window),
        fence_seconds=4.0,
        clock=clock,
        jitter=lambda: 0.0,
    )
    membership.open(lambda: None)
    return membership, clock


def number(membership: Standalone) -> int:
    current = membership.view().round
    assert current is not None
    return current.number


def fail(membership: Standalone, *, progressed: bool, charged: bool = True, fatal: bool = False) -> None:
    membership.announce(Breakage(cause="x", charged=charged, progressed=progressed, fatal=fatal))


def test_joining_forms_the_first_round_at_once_and_tells_so() -> None:
    membership, _ = make()
    changes: list[int] = []
    membership.open(lambda: changes.append(1))
    membership.join(after=0, store_port=1)
    assert (number(membership), changes) == (5, [1])


def test_a_failure_after_progress_is_followed_by_the_next_round_at_once() -> None:
    membership, _ = make()
    membership.join(after=0, store_port=1)
    fail(membership, progressed=True)
    membership.join(after=5, store_port=1)
    assert number(membership) == 6
    assert membership.view().restarts_used == 1


def test_workers_that_left_without_a_failure_are_not_put_down_to_the_last_one() -> None:
    membership, _ = make()
    membership.join(after=0, store_port=1)
    fail(membership, progressed=True)
    for after, cause in ((5, "x"), (6, "the workers have saved and left, though nobody asked this agent: SIGTERM to")):
        membership.join(after=after, store_port=1)
        current = membership.view().round
        assert current is not None
        assert current.cause.startswith(cause)


def test_the_round_does_not_follow_before_its_workers_have_stopped() -> None:
    membership, _ = make()
    membership.join(after=0, store_port=1)
    fail(membership, progressed=True)
    membership.join(after=4, store_port=1)
    assert number(membership) == 5


def test_failures_without_progress_are_slowed_down_and_that_is_visible() -> None:
    membership, clock = make(limit=9)
    membership.join(after=0, store_port=1)
    pauses = []
    for current in range(5, 9):
        fail(membership, progressed=False)
        membership.join(after=current, store_port=1)
        due = membership.pump(clock.now)
        pauses.append(0.0 if due is None else due - clock.now)
        if due is not None:
            assert "back-off" in membership.view().waiting[0].reason
            clock.now = due
            membership.pump(clock.now)
        assert number(membership) == current + 1
    assert pauses == [0.0, 0.25, 0.5, 1.0]


def test_the_budget_is_exact_and_its_end_closes_the_job_as_failed() -> None:
    membership, _ = make(limit=2)
    membership.join(after=0, store_port=1)
    for current in (5, 6):
        fail(membership, progressed=True)
        membership.join(after=current, store_port=1)
        assert number(membership) == current + 1
    fail(membership, progressed=True)
    closed = membership.view().round
    assert closed is not None
    assert (closed.phase, closed.outcome) == (Phase.CLOSED, "failed")
    membership.join(after=7, store_port=1)
    assert number(membership) == 7


def test_the_budget_comes_back_with_time() -> None:
    membership, clock = make(limit=1, window=10.0)
    membership.join(after=0, store_port=1)
    for current in range(5, 15):
        fail(membership, progressed=True)
        membership.join(after=current, store_port=1)
        clock.now += 11.0
        assert number(membership) == current + 1


def test_what_is_not_charged_leaves_the_budget_alone() -> None:
    membership, _ = make(limit=0)
    membership.join(after=0, store_port=1)
    fail(membership, progressed=False, charged=False)
    membership.join(after=5, store_port=1)
    assert (number(membership), membership.view().restarts_used) == (6, 0)


def test_a_fatal_failure_closes_the_job_whatever_the_budget() -> None:
    membership, _ = make(limit=100)
    membership.join(after=0, store_port=1)
    fail(membership, progressed=True, fatal=True)
    closed = membership.view().round
    assert closed is not None
    assert closed.outcome == "failed"


def test_done_closes_the_job_as_succeeded() -> None:
    membership, _ = make()
    membership.join(after=0, store_port=1)
    membership.done()
    closed = membership.view().round
    assert closed is not None
    assert (closed.phase, closed.outcome) == (Phase.CLOSED, "succeeded")


def test_the_fence_follows_the_last_finished_pass() -> None:
    membership, _ = make()
    assert membership.fence(10.0) == 14.0
