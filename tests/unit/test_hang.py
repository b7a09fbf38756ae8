"""Who hangs, by table: what the workers of a node report, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.agent.hang import Seen, look
from elastic.progress import Outcome, Phase, Progress

TIMEOUT = 10.0
START = 1000.0  # the times below are seconds since then


def seen(rank: int, phase: Phase = Phase.FORWARD_BACKWARD, *, sign: float = 90.0, **fields: Any) -> Seen:
    """A worker whose last sign came 10 s ago, at 90.0, in micro-step 1 of step 8."""
    stopped = fields.pop("stopped", False)
    defaults = {"in_loop": 1, "first_step_at": 50.0, "step": 7, "world_size": 2, "pid": 1}
    report = Progress(**{**defaults, "rank": rank, "phase": phase, "progressed_at": START + sign, **fields})
    return Seen(report=report, stopped=stopped)


WAITS = Phase.COMM_EXPOSED


@pytest.mark.parametrize(
    ("workers", "rank", "words"),
    [
        (
            [seen(0, WAITS), seen(1)],
            1,
            "no progress for 10.0 s in forward_backward of step 8, micro-step 1; rank 0 waits",
        ),
        ([seen(0, WAITS, sign=80.0), seen(1, Phase.DATA, micro_step=2)], 1, "in data of step 8, micro-step 3"),
        # both have stopped at once: who is less far on
        ([seen(0, Phase.OPTIMIZER, sign=80.0), seen(1)], 1, "in forward_backward of step 8"),
        ([seen(0, step=8), seen(1, Phase.OPTIMIZER)], 1, "in optimizer of step 8"),
        ([seen(0, sign=90.0), seen(1, sign=80.0)], 1, "no progress for 20.0 s in forward_backward"),
        # SIGSTOP, even while it waited
        ([seen(0), seen(1, WAITS, stopped=True)], 1, "its process is stopped"),
        ([seen(0), seen(1, Phase.EVALUATION, stopped=True)], 1, "in evaluation after step 7; its process is stopped"),
        # a loop of the user's that tells no phases
        ([seen(0, Phase.STARTING, waits=1), seen(1, Phase.STARTING)], 1, "no progress for 10.0 s in step 8; rank 0"),
        # declared: ten times as long, or what was said
        (
            [seen(0, WAITS), seen(1, Phase.EVALUATION, sign=0.0)],
            1,
            "no progress for 100.0 s in evaluation after step 7",
        ),
        ([seen(0, WAITS), seen(1, phase_limit=10.0)], 1, "forward_backward"),
        # nobody else can be behind: the collectives do not match
        ([seen(0, WAITS), seen(1, WAITS)], None, "after step 7: ranks 0, 1 wait for each other"),
        ([seen(0, WAITS, world_size=3, sign=-25.0), seen(1, WAITS, world_size=3, sign=-30.0)], None, "of another node"),
        # the others are done, or have not come to the loop
        ([seen(0, outcome=Outcome.FINISHED, sign=1.0), seen(1)], 1, "step 8"),
        ([seen(0, first_step_at=0.0, step=6), seen(1, WAITS)], 0, "in forward_backward of step 7"),
        ([seen(0, phase=99), seen(1, WAITS)], 0, "in step 8"),
    ],
)
def test_a_rank_is_hung(workers: list[Seen], rank: int | None, words: str) -> None:
    verdict, due = look(workers, now=START + 100.0, timeout_seconds=TIMEOUT)
    assert verdict is not None
    assert due is None
    assert verdict.rank == rank
    assert words in verdict.message
    assert verdict.consequence == ("another node" in words)


@pytest.mark.parametrize(
    ("workers", "due"),
    [
        ([seen(0, WAITS, sign=10.0), seen(1, sign=90.5)], 100.5),
        ([seen(0, sign=10.0, in_loop=0), seen(1, sign=10.0, first_step_at=0.0)], None),
        ([seen(0, sign=10.0, outcome=Outcome.DRAINED)], None),
        ([seen(0, WAITS, sign=10.0), seen(1, Phase.EVALUATION, sign=10.0)], 110.0),
        ([seen(0, WAITS, sign=10.0), seen(1, Phase.CHECKPOINT, sign=10.0, phase_limit=500.0)], 510.0),
        ([seen(0, WAITS, sign=10.0), seen(1, Phase.FORWARD_BACKWARD, sign=10.0, phase_limit=200.0)], 210.0),
        # one rank evaluates alone; whether the other, whose loop does not tell, waits for it is not known
        ([seen(0, Phase.EVALUATION, sign=10.0), seen(1, Phase.STARTING, sign=10.0)], 110.0),
        # rank 1 has just evaluated for long, and rank 0 has waited for it without telling
        ([seen(0, sign=10.0), seen(1, sign=95.0)], 105.0),
        # a rank elsewhere may take long: its own agent knows
        ([seen(0, WAITS, sign=10.0, world_size=2)], 10.0 + 1.25 * 100.0),
        ([seen(0, Phase.EVALUATION, sign=10.0, waits=1, world_size=2)], 10.0 + 1.25 * 100.0),
        ([seen(0, WAITS, sign=10.0, world_size=1)], 20.0),
        ([seen(0, WAITS, sign=10.0), seen(1, WAITS, sign=95.0)], 105.0),
        ([], None),
    ],
)
def test_nothing_is_hung_before_it_is_due(workers: list[Seen], due: float | None) -> None:
    at = None if due is None else START + due
    assert look(workers, now=START + 100.0 if at is None else at - 0.001, timeout_seconds=TIMEOUT) == (None, at)
    if at is not None:
        assert look(workers, now=at, timeout_seconds=TIMEOUT)[0] is not None


def test_time_in_which_the_agent_stood_still_does_not_count() -> None:
    workers = [seen(0, WAITS, sign=10.0), seen(1, sign=10.0)]
    assert look(workers, now=START + 100.0, timeout_seconds=TIMEOUT, awake_since=START + 99.0) == (None, START + 109.0)
    assert look(workers, now=START + 109.0, timeout_seconds=TIMEOUT, awake_since=START + 99.0)[0] is not None


def test_a_writer_that_only_has_a_heartbeat_is_judged_by_it() -> None:
    worker = seen(0, sign=-START, heartbeat=START + 91.0)
    assert look([worker], now=START + 100.0, timeout_seconds=TIMEOUT) == (None, START + 101.0)
