"""Pure decisions: which state to restore, what is void, which steps may go."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from checkpoints.choose import Candidate, Choice, Homes, Offer, choose, find_homes, voiding_round
from checkpoints.retention import Kept, removable
from checkpoints.rounds import frontier


def state(round_: int, base_step: int, step: int) -> Candidate:
    return Candidate(name=f"step-{step:012d}", commit=f"r{round_}s{step}", round=round_, base_step=base_step, step=step)


def offer(*candidates: Candidate, rounds: tuple[tuple[int, int], ...] = ()) -> Offer:
    return Offer(candidates=candidates, unsound=(), rounds=rounds)


@pytest.mark.parametrize(
    ("candidates", "rounds", "chosen"),
    [
        ((), (), None),
        (((1, 0, 10), (1, 0, 20)), (), (1, 20)),
        (((1, 0, 10), (1, 0, 20), (2, 10, 15)), (), (2, 15)),  # 20 is of a line that round 2 left
        (((1, 0, 10), (1, 0, 20)), ((2, 10),), (1, 10)),  # round 2 never committed, but began
        (((1, 0, 40), (2, 30, 35)), (), (2, 35)),  # a commit of round 1 thawed in late
        (((1, 0, 10), (1, 0, 20), (2, 20, 30), (3, 20, 25)), (), (3, 25)),
        (((1, 0, 10), (2, 10, 20)), ((3, 20), (4, 20)), (2, 20)),
        (((1, 0, 10),), ((2, 0),), None),  # round 2 was told to start from zero
    ],
)
def test_newest_state_of_the_line_is_chosen(
    candidates: tuple[tuple[int, int, int], ...], rounds: tuple[tuple[int, int], ...], chosen: tuple[int, int] | None
) -> None:
    states = [state(*candidate) for candidate in candidates]
    for order in itertools.permutations(states):
        choice = choose([offer(*order, rounds=rounds)], {}, Homes(disk=(0,)))
        assert (choice.chosen and (choice.chosen.round, choice.chosen.step)) == chosen


def test_struck_candidate_gives_way_to_the_next_older_of_the_line_with_its_reason() -> None:
    seen = [offer(state(1, 0, 10), state(1, 0, 20), state(2, 10, 15))]
    choice = choose(seen, {"r2s15": "damaged"}, Homes(disk=(0,)))
    assert choice.chosen == state(1, 0, 10)
    assert choice.skipped == (
        ("step-000000000015", "damaged"),
        ("step-000000000020", "void: round 2 started from step 10, below it"),
    )


def test_of_a_shared_directory_only_what_every_rank_sees_is_eligible_and_the_blind_are_named() -> None:
    both, one = state(1, 0, 10), state(1, 0, 20)
    choice = choose([offer(both, one), offer(both), offer(both)], {}, Homes(disk=(0, 0, 0)))
    assert choice.chosen == both
    assert "not readable by rank 1, 2" in choice.skipped[0][1]


def test_what_one_home_has_whole_is_eligible_for_all() -> None:
    both, one = state(1, 0, 10), state(1, 0, 20)
    offers = [offer(both), offer(both), offer(both, one), offer(both, one)]
    assert choose(offers, {}, Homes(disk=(0, 0, 2, 2))) == Choice(chosen=one, skipped=())
    offers[3] = offer(both)  # it does not see what rank 2 of the same home sees
    choice = choose(offers, {}, Homes(disk=(0, 0, 2, 2)))
    assert choice.chosen == both
    assert "not readable by rank 0, 1, 3" in choice.skipped[0][1]


def test_same_step_of_another_commit_is_another_state() -> None:
    mine, other = state(1, 0, 10), Candidate(name="step-000000000010", commit="x", round=1, base_step=0, step=10)
    assert choose([offer(mine), offer(other)], {}, Homes(disk=(0, 0))).chosen is None
    assert choose([offer(mine), offer(other)], {"x": "damaged"}, Homes(disk=(0, 1))).chosen == mine


def test_evidence_of_any_rank_counts() -> None:
    offers = [offer(state(1, 0, 20)), offer(state(1, 0, 20), rounds=((2, 10),))]
    assert choose(offers, {}, Homes(disk=(0, 0))).chosen is None
    assert choose(offers, {}, Homes(disk=(0, 1))).chosen is None


@pytest.mark.parametrize("seed", range(30))
def test_pruned_rounds_void_exactly_what_all_of_them_did(seed: int) -> None:
    entries = [(r, (seed * 7919 + r * r * 31) % 12) for r in range(1, 12)]
    for round_, step in itertools.product(range(13), range(13)):
        full = voiding_round(round_, step, entries) is not None
        assert (voiding_round(round_, step, frontier(entries)) is not None) == full
    assert max(frontier(entries))[0] == 11


def kept(step: int, round_: int = 1, sound: bool = True, void: bool = False) -> Kept:
    return Kept(name=f"{step}", round=round_, step=step, sound=sound, void=void)


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "gone"),
    [
        ([], 3, None, []),
        ([kept(s) for s in (1, 2, 3)], 3, None, []),
        ([kept(s) for s in (1, 2, 3, 4, 5)], 2, None, ["1", "2", "3"]),
        ([kept(s) for s in (10, 15, 20, 25, 30)], 1, 10, ["15", "25"]),
        ([kept(1), kept(2), kept(3, sound=False)], 1, None, ["1"]),  # 3 did not verify: neither counted nor removed
        ([kept(1, sound=False), kept(2)], 1, None, []),
        ([kept(9, void=True), kept(5, round_=2)], 1, None, ["9"]),
        ([kept(9, void=True)], 1, None, []),  # no good one is there yet
        ([kept(0), kept(7)], 1, 5, []),
    ],
)
def test_retention_keeps_the_last_the_every_and_the_unverified(
    steps: list[Kept], keep_last: int, keep_every: int | None, gone: list[str]
) -> None:
    assert removable(steps, keep_last=keep_last, keep_every=keep_every) == gone


def test_retention_counts_by_round_before_step() -> None:
    steps = [kept(30, round_=1), kept(20, round_=2), kept(25, round_=2)]
    assert removable(steps, keep_last=2, keep_every=None) == ["30"]


def in_memory(round_: int, base_step: int, step: int) -> Candidate:
    found = state(round_, base_step, step)
    return dataclasses.replace(found, name=f"{found.name} in memory", commit=f"m{found.commit}", tier="memory")


@pytest.mark.parametrize(
    ("disk", "memory", "rounds", "chosen"),
    [
        (((1, 0, 10),), ((1, 0, 12),), (), in_memory(1, 0, 12)),
        (((1, 0, 10),), ((1, 0, 10),), (), in_memory(1, 0, 10)),  # a tie: no disk is read
        (((2, 8, 9),), ((1, 0, 12),), (), state(2, 8, 9)),  # kept by a node that was away
        (((1, 0, 10),), ((1, 0, 12),), ((2, 10),), state(1, 0, 10)),
        (((1, 0, 10),), ((2, 10, 11), (1, 0, 12)), (), in_memory(2, 10, 11)),
        (((1, 0, 10),), ((2, 12, 13),), ((2, 12),), in_memory(2, 12, 13)),  # a round that began above the disk's newest
        (((1, 0, 10),), (), ((2, 12),), state(1, 0, 10)),  # and lost its memory
        ((), ((1, 0, 12),), ((2, 0),), None),
    ],
)
def test_memory_obeys_the_line_of_descent_and_wins_a_tie(
    disk: tuple[tuple[int, int, int], ...],
    memory: tuple[tuple[int, int, int], ...],
    rounds: tuple[tuple[int, int], ...],
    chosen: Candidate | None,
) -> None:
    states = [*(state(*each) for each in disk), *(in_memory(*each) for each in memory)]
    for order in itertools.permutations(states):
        seen = [dataclasses.replace(offer(*order, rounds=rounds), node="a")]
        assert choose(seen, {}, find_homes(seen, (0,), writable=True)).chosen == chosen


def test_what_one_node_has_in_memory_serves_all_and_directory_and_memory_have_homes_of_their_own() -> None:
    """Four ranks on two nodes share a directory; the nodes do not share their memory."""
    kept = in_memory(1, 0, 12)
    seen = [dataclasses.replace(offer(state(1, 0, 10)), node=node) for node in "aabb"]
    seen[2:] = [dataclasses.replace(each, candidates=(*each.candidates, kept)) for each in seen[2:]]
    homes = find_homes(seen, (0, 0, 0, 0), writable=True)
    assert homes == Homes(disk=(0, 0, 0, 0), memory=(0, 0, 2, 2))
    assert choose(seen, {}, homes).chosen == kept
    assert choose(seen, {kept.commit: "damaged"}, homes) == Choice(
        chosen=state(1, 0, 10), skipped=((kept.name, "damaged"),)
    )


def test_rank_without_memory_is_sent_the_state_and_keeps_no_copy() -> None:
    seen = [dataclasses.replace(offer(in_memory(1, 0, 12)), node="a"), offer()]
    homes = find_homes(seen, (0, 1), writable=True)
    assert (homes.memory, homes.keepless) == ((0, 1), frozenset({("memory", 1)}))


@pytest.mark.parametrize(("disk", "refuse"), [((), False), (((1, 0, 10),), True)])
def test_only_what_is_lost_on_disk_forbids_a_fresh_start(disk: tuple[tuple[int, int, int], ...], refuse: bool) -> None:
    seen = [offer(*(state(*each) for each in disk), in_memory(1, 0, 12), rounds=((2, 0),))]
    assert choose(seen, {}, Homes(disk=(0,), memory=(0,))).refuse is refuse
