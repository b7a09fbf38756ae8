"""Pure: who sends the chosen state to whom, and what a failed attempt teaches."""

from __future__ import annotations

import itertools

from checkpoints.choose import Candidate, Offer, find_homes
from checkpoints.copies import Copies, Plan, Report

GOOD = Report()
SENDER = Report(error="cut", kind="SenderFailedError", sender_failed=True)
LOCAL = Report(error="damaged", kind="CorruptCheckpointError")
STATE = Candidate(name="step-000000000001", commit="c", round=1, base_step=0, step=1)


def offers(*has: bool) -> list[Offer]:
    return [Offer(candidates=(STATE,) if each else (), unsound=(), rounds=()) for each in has]


def copies_of(seen: list[Offer], homes: tuple[int, ...], *, writable: bool) -> Copies:
    return Copies(seen, find_homes(seen, homes, writable=writable))


def test_whoever_lacks_it_is_sent_it_and_the_senders_share_the_work() -> None:
    copies = copies_of(offers(True, True, False, False, False, True), (0, 0, 2, 2, 4, 5), writable=True)
    assert copies.plan("c") == Plan(senders={2: 0, 4: 5}, direct=frozenset())


def test_home_of_which_one_rank_does_not_see_it_lacks_it() -> None:
    copies = copies_of(offers(True, False, True), (0, 0, 2), writable=True)
    assert copies.plan("c") == Plan(senders={0: 2}, direct=frozenset())


def test_all_have_it_needs_no_transfer_and_nobody_has_it_is_no_plan() -> None:
    assert copies_of(offers(True, True), (0, 1), writable=False).plan("c") == Plan(senders={}, direct=frozenset())
    assert copies_of(offers(False, False), (0, 1), writable=True).plan("c") is None


def test_without_known_groups_nothing_is_written() -> None:
    copies = copies_of(offers(True, False, False), (0, 1, 2), writable=False)
    assert copies.plan("c") == Plan(senders={1: 0, 2: 0}, direct=frozenset({1, 2}))


def test_damaged_copy_is_replaced_and_no_longer_sent() -> None:
    copies = copies_of(offers(True, True, False), (0, 1, 2), writable=True)
    first = copies.plan("c")
    assert first is not None
    copies.learn("c", first, [LOCAL, GOOD, SENDER])
    assert copies.plan("c") == Plan(senders={0: 1, 2: 1}, direct=frozenset())


def test_receiver_that_got_it_sends_it_on_to_who_is_cut_off_from_the_first_sender() -> None:
    copies = copies_of(offers(True, False, False), (0, 1, 2), writable=True)
    first = copies.plan("c")
    assert first is not None
    copies.learn("c", first, [GOOD, GOOD, SENDER])
    assert copies.plan("c") == Plan(senders={2: 1}, direct=frozenset())


def test_receiver_that_kept_no_copy_sends_nothing() -> None:
    copies = copies_of(offers(True, False, False), (0, 1, 2), writable=True)
    first = copies.plan("c")
    assert first is not None
    copies.learn("c", first, [GOOD, Report(direct=True), SENDER])
    assert copies.plan("c") is None


def test_disk_that_gives_back_other_bytes_than_it_took_is_left_out_the_next_time() -> None:
    copies = copies_of(offers(True, False), (0, 1), writable=True)
    first = copies.plan("c")
    assert first is not None
    copies.learn("c", first, [GOOD, LOCAL])
    assert copies.plan("c") == Plan(senders={1: 0}, direct=frozenset({1}))


def test_attempts_at_one_commit_end_however_they_fail() -> None:
    for pattern in itertools.product((GOOD, SENDER, LOCAL), repeat=4):
        if pattern == (GOOD,) * 4:
            continue
        copies = copies_of(offers(True, True, False, False), (0, 1, 2, 3), writable=True)
        for _ in range(20):
            plan = copies.plan("c")
            if plan is None:
                break
            reports = [
                LOCAL if report is SENDER and home not in plan.senders else report
                for home, report in enumerate(pattern)
            ]
            copies.learn("c", plan, reports)
        assert plan is None or all(home not in plan.senders for home, r in enumerate(pattern) if r is not GOOD)
