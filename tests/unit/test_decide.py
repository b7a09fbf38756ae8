"""The agent's decisions as a table: one observation, the acts that follow."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.agent.decide import Act, Asked, Observation, WorkerView, decide
from elastic.errors import ExitCode
from elastic.progress import Outcome
from elastic.rendezvous.round import Phase


def workers(*states: Any) -> tuple[WorkerView, ...]:
    """`None` runs, `"loop"` runs in its training loop, a number is an exit code, `(code, fields)` more of it."""
    views = []
    for rank, state in enumerate(states):
        fields: dict[str, Any] = {}
        if isinstance(state, tuple):
            state, fields = state
        if state == "loop":
            state, fields = None, {"in_loop": True}
        views.append(WorkerView(local_rank=rank, exit_code=state, **fields))
    return tuple(views)


def seen(**fields: Any) -> Observation:
    return Observation(**{"now": 100.0, "round_number": 3, "started_round": 3, **fields})


def acts(observation: Observation) -> list[str]:
    return [action.act.name for action in decide(observation)]


DRAINED = (0, {"outcome": Outcome.DRAINED, "in_loop": True})
FINISHED = (0, {"outcome": Outcome.FINISHED, "in_loop": True})
FATAL = (1, {"outcome": Outcome.FATAL})
LOST_PEER = (1, {"consequence": True})
STOPPED = (-15, {"stopped_by_us": True})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # before the first round
        ({"round_number": 0, "started_round": 0}, ["JOIN"]),
        ({"round_number": 0, "started_round": 0, "may_join_again": False}, []),  # no room for a store yet
        ({"round_number": 0, "started_round": 0, "joining": True}, []),
        ({"started_round": 0, "joining": True}, ["START"]),
        ({"started_round": 0, "joining": True, "expelled": True, "round_number": 0}, ["JOIN"]),
        ({"started_round": 2, "joining": True, "round_phase": Phase.BROKEN}, ["JOIN"]),
        ({"started_round": 2, "joining": True, "round_phase": Phase.BROKEN, "may_join_again": False}, []),
        ({"started_round": 2, "joining": True, "fenced": True}, []),
        ({"round_number": 0, "started_round": 0, "joining": True, "asked": Asked.DRAIN}, ["LEAVE", "FINISH"]),
        # all is well
        ({"workers": workers("loop", "loop")}, []),
        ({"workers": workers(FINISHED, "loop")}, []),
        # a worker failed
        ({"workers": workers(1, "loop")}, ["ANNOUNCE", "KILL"]),
        ({"workers": workers(-9, None)}, ["ANNOUNCE", "TERMINATE"]),
        ({"workers": workers(-9, None), "announced": True, "terminate_until": 101.0}, []),
        ({"workers": workers(-9, None), "announced": True, "terminate_until": 100.0}, ["KILL"]),
        ({"workers": workers(-9, None), "announced": True, "killed": True}, []),
        # a worker that only lost a peer: the cause gets a moment to show
        ({"workers": workers(LOST_PEER, "loop")}, ["SETTLE"]),
        ({"workers": workers(LOST_PEER, "loop"), "settling_until": 100.5}, []),
        ({"workers": workers(LOST_PEER, "loop"), "settling_until": 99.5}, ["ANNOUNCE", "KILL"]),
        ({"workers": workers(LOST_PEER, 1, "loop"), "settling_until": 100.5}, ["ANNOUNCE", "KILL"]),
        # a worker hangs: the stacks first
        ({"workers": workers("loop", "loop"), "hung": True}, ["DUMP"]),
        ({"workers": workers("loop", "loop"), "hung": True, "stacks_until": 100.5}, []),
        ({"workers": workers("loop", LOST_PEER), "hung": True, "stacks_until": 100.5}, []),
        ({"workers": workers("loop", "loop"), "hung": True, "stacks_until": 100.0}, ["ANNOUNCE", "KILL"]),
        ({"workers": workers("loop", "loop"), "hung": True, "stacks_until": 99.0, "killed": True}, []),
        ({"workers": workers("loop", "loop"), "hung": True, "asked": Asked.DRAIN}, ["DUMP"]),
        # all are gone
        ({"workers": workers(1, -9), "announced": True}, ["CLEAR", "JOIN"]),
        ({"workers": workers(1, 1)}, ["ANNOUNCE", "CLEAR", "JOIN"]),
        ({"workers": workers(FINISHED, FINISHED)}, ["CLEAR", "DONE"]),
        ({"workers": workers(0, 0)}, ["CLEAR", "DONE"]),
        ({"workers": workers(DRAINED, DRAINED)}, ["CLEAR", "JOIN"]),
        ({"workers": workers(STOPPED, STOPPED), "frozen": True}, ["ANNOUNCE", "CLEAR", "JOIN"]),
        # a drain
        ({"workers": workers("loop", "loop"), "asked": Asked.DRAIN}, ["DRAIN"]),
        ({"workers": workers("loop", "loop"), "asked": Asked.DRAIN, "drain_until": 120.0}, []),
        ({"workers": workers("loop", "loop"), "asked": Asked.DRAIN, "drain_until": 100.0}, ["KILL"]),
        ({"workers": workers("loop", None), "asked": Asked.DRAIN}, ["TERMINATE"]),
        ({"workers": workers(None, None), "asked": Asked.DRAIN, "terminate_until": 99.0}, ["KILL"]),
        ({"workers": workers("loop", "loop"), "round_phase": Phase.DRAINING}, ["DRAIN"]),
        ({"workers": workers("loop", "loop"), "round_phase": Phase.BROKEN}, ["KILL"]),
        ({"workers": workers("loop", "loop"), "round_number": 4}, ["KILL"]),
        # a stop does not wait for anything
        ({"workers": workers("loop", "loop"), "asked": Asked.STOP}, ["ANNOUNCE", "KILL"]),
        ({"workers": workers("loop", "loop"), "asked": Asked.STOP, "announced": True}, ["KILL"]),
        ({"workers": workers("loop", "loop"), "asked": Asked.STOP, "drain_until": 120.0}, ["ANNOUNCE", "KILL"]),
        # after the end
        ({"done": True, "round_phase": Phase.CLOSED, "closed": ExitCode.SUCCEEDED}, ["LEAVE", "FINISH"]),
        ({"done": True}, []),
        ({"done": True, "round_phase": Phase.BROKEN}, ["JOIN"]),
        ({"round_number": 0, "joining": True, "closed": ExitCode.SUCCEEDED}, ["LEAVE", "FINISH"]),
        # what ends a round elsewhere
        ({"workers": workers("loop", "loop"), "expelled": True}, ["KILL"]),
        ({"workers": workers(LOST_PEER, "loop"), "round_phase": Phase.BROKEN}, ["KILL"]),
        ({"workers": workers("loop", "loop"), "drain_wanted": True}, ["DRAIN"]),
        ({"workers": workers("loop", "loop"), "error": ExitCode.STORE_GONE}, ["KILL"]),
        ({"joining": True, "round_phase": Phase.BROKEN}, []),
    ],
)
def test_an_observation_leads_to_these_acts(fields: dict[str, Any], expected: list[str]) -> None:
    assert acts(seen(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"workers": workers(DRAINED, DRAINED), "asked": Asked.DRAIN}, ExitCode.DRAINED),
        ({"workers": workers(DRAINED, DRAINED), "asked": Asked.DRAIN, "steps_lost": True}, ExitCode.STEPS_LOST),
        ({"workers": workers(FINISHED, FINISHED), "asked": Asked.DRAIN}, None),  # the end came first: DONE, then 0
        ({"workers": workers((0, {"stopped_by_us": True})), "asked": Asked.DRAIN}, ExitCode.DRAINED),
        ({"workers": workers(STOPPED, STOPPED), "asked": Asked.STOP, "steps_lost": True}, ExitCode.STEPS_LOST),
        ({"workers": workers(FATAL, STOPPED), "announced": True}, ExitCode.FAILED),
        ({"workers": workers(FATAL, STOPPED), "announced": True, "asked": Asked.DRAIN}, ExitCode.FAILED),
        ({"workers": workers(78, STOPPED), "announced": True}, ExitCode.DO_NOT_RETRY),
        ({"round_phase": Phase.CLOSED, "closed": ExitCode.FAILED, "joining": True}, ExitCode.FAILED),
        ({"round_phase": Phase.CLOSED, "closed": ExitCode.SUCCEEDED, "done": True}, ExitCode.SUCCEEDED),
        ({"joining": True, "error": ExitCode.NOT_ENOUGH_NODES}, ExitCode.NOT_ENOUGH_NODES),
        ({"joining": True, "asked": Asked.DRAIN, "steps_lost": True}, ExitCode.STEPS_LOST),
    ],
)
def test_the_exit_code_says_how_the_job_ended(fields: dict[str, Any], expected: ExitCode | None) -> None:
    finishing = [action.exit_code for action in decide(seen(**fields)) if action.act is Act.FINISH]
    assert finishing == ([] if expected is None else [expected])
