"""The last line of the log: how the job ended on this node."""

from __future__ import annotations

import pytest

from elastic.agent.ending import Ending, say_how_it_ended
from elastic.config import JobConfig
from elastic.errors import ExitCode

ONE_NODE = JobConfig(script="a")
WITH_DIRECTORY = JobConfig(script="a", checkpoint_dir="/c")
MANY_NODES = JobConfig(script="a", checkpoint_dir="/c", max_nodes=2)


@pytest.mark.parametrize(
    ("config", "committed_step", "said"),
    [
        (ONE_NODE, -1, "nothing was committed: what was trained is trained again; give --checkpoint-dir to keep it"),
        (WITH_DIRECTORY, -1, "nothing was committed: what was trained is trained again"),
        (WITH_DIRECTORY, 40, "step 40 is the newest that is committed in /c: what lies between is trained again"),
        (
            MANY_NODES,
            40,
            "step 40 is the newest that is committed in /c: what lies between is trained again, unless other nodes of "
            "the job have it in memory and go on",
        ),
    ],
)
def test_a_stop_that_loses_steps_says_which_and_what_would_keep_them(
    config: JobConfig, committed_step: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    ending = Ending(
        exit_code=ExitCode.STEPS_LOST,
        error=None,
        cause="",
        had_last_round=True,
        applied_step=51,
        committed_step=committed_step,
        failure=None,
        last_words="",
    )
    say_how_it_ended(ending, config)
    assert caplog.messages == [f"stopped at step 51, and {said}"]
