"""What the agent makes of workers that never say that they train: their state, its warnings and its last words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.agent.sessions import Sessions
from elastic.config import JobConfig
from elastic.progress import Progress

SCRIPT = JobConfig(script="train.py")
SILENT, OPENED, IN_LOOP = Progress(), Progress(pid=7), Progress(pid=7, in_loop=1)


def worker(local_rank: int = 0, report: Progress = SILENT, *, was_warm: bool = False) -> Any:
    plan = SimpleNamespace(local_rank=local_rank, rank=local_rank)
    return SimpleNamespace(
        plan=plan, progress=report, started_at=0.0, is_alive=True, counts_as_running=False, was_warm=was_warm
    )


def test_a_script_without_a_session_counts_as_running_after_a_while() -> None:
    sessions, script = Sessions(SCRIPT), worker()
    sessions.look([script], 9.0)
    assert not script.counts_as_running, "it may still import"
    sessions.look([script], 11.0)
    assert script.counts_as_running


@pytest.mark.parametrize(("was_warm", "seconds"), [(False, 5.0), (True, 2.0)])
def test_a_known_script_counts_as_running_sooner_in_its_next_round(was_warm: bool, seconds: float) -> None:
    sessions, again = Sessions(SCRIPT), worker(was_warm=was_warm)
    sessions.look([worker()], 11.0)
    sessions.look([again], seconds - 0.1)
    assert not again.counts_as_running
    sessions.look([again], seconds + 0.1)
    assert again.counts_as_running


def test_who_opens_its_session_late_does_not_go_back_to_starting_and_is_waited_for_in_the_next_round() -> None:
    sessions, first, second = Sessions(SCRIPT), worker(), worker()
    for report, now in ((SILENT, 40.0), (OPENED, 41.0), (IN_LOOP, 50.0), (OPENED, 51.0)):
        first.progress = report
        sessions.look([first], now)
        assert first.counts_as_running, report
    sessions.look([second], 100.0)
    assert not second.counts_as_running
    second.progress = IN_LOOP
    sessions.look([second], 101.0)
    assert second.counts_as_running


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SCRIPT, ""),
        (JobConfig(script="a", checkpoint_dir="/c"), "--checkpoint-dir has no effect"),
        (
            JobConfig(script="a", checkpoint_dir="/c", checkpoint_every="10s", hang_timeout_seconds=9.0),
            "--checkpoint-dir, --checkpoint-every and --hang-timeout have no effect",
        ),
        (JobConfig(script="a", memory_every=5, hang_timeout_seconds=9.0), "--memory-every and --hang-timeout have no"),
    ],
)
def test_settings_that_need_a_session_are_warned_of_once_where_there_is_none(
    config: JobConfig, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    sessions, late = Sessions(config), worker(1)
    sessions.look([worker(0, OPENED), late], 9.0)
    assert not caplog.messages
    for now in (11.0, 12.0):
        sessions.look([worker(0, OPENED), late], now)
    late.progress = OPENED
    sessions.look([late], 13.0)
    sessions.look([worker(1)], 99.0)
    assert len(caplog.messages) == bool(words)
    if words:
        assert caplog.messages[0].startswith(f"rank 1 has opened no session so far: {words}")
        assert "no effect until it does" in caplog.messages[0]


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ([], "training had not begun yet"),
        ([(OPENED, 5.0)], "training had not begun yet"),
        ([(SILENT, 40.0), (OPENED, 41.0)], "training had not begun yet"),
        ([(SILENT, 5.0)], "no session was open yet: training had not begun, or its script needs none"),
        ([(SILENT, 40.0)], "its script had opened no session: without one, it goes on from its own last save"),
    ],
)
def test_the_last_words_say_no_more_than_is_known(looks: list[tuple[Progress, float]], words: str) -> None:
    sessions = Sessions(SCRIPT)
    for report, now in looks:
        sessions.look([worker(0, report)], now)
    assert sessions.last_words.startswith(words)
