"""Which step in memory the agent calls safe."""

from __future__ import annotations

import pytest

from elastic.agent.crew import kept_step
from elastic.progress import Progress


def in_loop(*steps: int) -> list[Progress]:
    return [Progress(in_loop=1, memory_step=step) for step in steps]


@pytest.mark.parametrize(
    ("reports", "kept"),
    [
        pytest.param(in_loop(33, 33), 33, id="all ranks keep it"),
        pytest.param(in_loop(33, 32), 32, id="one rank still seals the newest"),
        pytest.param(in_loop(33, -1), -1, id="one rank keeps nothing"),
        pytest.param(in_loop(3), 3, id="a round that went back further than the last one had come"),
        pytest.param([*in_loop(21), Progress(memory_step=-1)], 20, id="a worker restores: the last round's is there"),
        pytest.param([Progress(), Progress()], 20, id="no worker has begun"),
        pytest.param([], 20, id="between two rounds"),
    ],
)
def test_a_step_in_memory_is_safe_once_every_rank_of_the_node_has_its_share(reports: list[Progress], kept: int) -> None:
    assert kept_step(reports, 20) == kept
