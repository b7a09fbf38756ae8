"""`elasticd demo` from its command line, and what it says when something is not right."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from elastic.demo import demo
from elastic.demo.ledger import Audit
from elastic.demo.outcome import Kill, Outcome, RunFiles
from elastic.demo.report import table
from elastic.demo.screen import Screen
from elastic.demo.settings import Settings, parse
from elastic.errors import UsageError
from elastic.status import Incident, IncidentSeconds
from tests.support.job import marked, wait_for

AUDIT = Audit(
    steps=20, expected=320, used=320, lost=0, doubled=0, strange=0, wrong_steps=(), repeated_steps=(11, 12)
)  # fmt: skip
RUN = RunFiles(audit=AUDIT, losses={1: 5.5, 20: 3.25}, digest=(20, "abc"))
SECONDS = IncidentSeconds(detect=0.01, stop=0.1, rendezvous=0.0, start=2.0, restore=0.1, first_step=0.2, total=2.41)
INCIDENT = Incident(time=0.0, cause="rank 1 killed", round=2, lost_steps=2, seconds=SECONDS)


def outcome(**changes: object) -> Outcome:
    whole = Outcome(
        settings=parse(["--steps", "20"]),
        kill=Kill(rank=1, pid=123, step=12, round=1),
        incident=INCIDENT,
        disturbed=RUN,
        reference=dataclasses.replace(RUN, audit=dataclasses.replace(AUDIT, repeated_steps=())),
        seconds=20.0,
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]  # fields of Outcome


@contextlib.contextmanager
def running_demo(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The demo with a temporary directory of its own; certainly gone afterwards."""
    mark = folder.name
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic", "demo", *flags],
        env={**os.environ, "TMPDIR": str(folder), "ELASTICD_TEST_MARK": mark, "PET_NNODES": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_all_is_right_when_nothing_is_wrong() -> None:
    good = outcome()
    assert good.faults() == []
    assert good.to_json()["right"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"incident": None}, "no recovery"),
        ({"disturbed": dataclasses.replace(RUN, digest=(20, "abd"))}, "parameters differ"),
        ({"disturbed": dataclasses.replace(RUN, digest=(19, "abc"))}, "did not come to step 20"),
        ({"disturbed": dataclasses.replace(RUN, digest=None)}, "did not come to step 20"),
        ({"reference": dataclasses.replace(RUN, digest=None)}, "without it did not come to step 20"),
        ({"disturbed": dataclasses.replace(RUN, audit=dataclasses.replace(AUDIT, lost=3))}, "3 samples were lost"),
        ({"disturbed": dataclasses.replace(RUN, audit=dataclasses.replace(AUDIT, doubled=1))}, "used more than once"),
        ({"disturbed": dataclasses.replace(RUN, audit=dataclasses.replace(AUDIT, strange=1))}, "not planned"),
        ({"disturbed": dataclasses.replace(RUN, audit=dataclasses.replace(AUDIT, wrong_steps=(4, 5)))}, "first is 4"),
        ({"reference": dataclasses.replace(RUN, audit=dataclasses.replace(AUDIT, lost=3))}, "without it: 3 samples"),
    ],
)
def test_each_thing_that_is_wrong_is_said_and_fails_the_demo(changes: dict[str, object], words: str) -> None:
    bad, out = outcome(**changes), io.StringIO()
    assert any(words in fault for fault in bad.faults()), bad.faults()
    assert bad.to_json()["right"] is False
    assert demo._tell(bad, Screen(Console(file=out))) == 1
    assert "WRONG" in out.getvalue()


def test_the_table_has_every_number() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(table(outcome()))
    shown = [line.split() for line in out.getvalue().splitlines()]
    for row in (
        *("steps 20 on 2 workers", "loss, first and last step 5.500 -> 3.250", "killed by SIGKILL rank 1 at step 12"),
        *("start the workers 2.000 s", "recovery, kill to first new step 2.410 s", "steps repeated 2 (11 to 12)"),
        *("samples expected 320", "samples used 320", "samples lost 0", "samples doubled 0"),
        "parameters equal, bit by bit, to a run without the kill yes",
    ):
        assert row.split() in shown, row


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--workers", "0"), "--workers 0: give 1 to 16"),
        (("--steps", "5"), "--steps 5: give at least 20"),
        (("--save-every", "100"), "--save-every 100: give 2 to 25"),
        (("--data", "/no/such/file"), "/no/such/file: No such file"),
        (("--tsep", "5"), "unrecognized arguments: --tsep"),
    ],
)
def test_a_bad_flag_is_refused_by_name(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(flags)


@pytest.mark.parametrize("steps", [20, 40, 160, 1001])
def test_the_kill_comes_when_there_is_enough_before_and_after_it_and_between_two_checkpoints(steps: int) -> None:
    settings = parse(["--steps", str(steps)])
    assert 0.2 * steps <= settings.kill_at <= 0.35 * steps
    assert settings.kill_at % settings.save_every


def test_away_from_a_terminal_there_are_few_lines_and_no_step_is_told_twice() -> None:
    out = io.StringIO()
    with Screen(Console(file=out)).progress(100) as moved:
        for step in [0, *range(60), *range(45, 101)]:
            moved(step, None if step < 2 else 3.0, "running")
    assert out.getvalue().splitlines() == [f"  step {step} of 100, loss 3.00" for step in (25, 50, 75)]


def test_on_a_terminal_one_line_moves_in_place_and_is_gone_at_the_end() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=80))
    with screen.progress(100) as moved:
        moved(1, 5.5, "running")
        screen.say("killed [rank 1]")
    text = out.getvalue()
    assert "loss 5.50" in text
    assert "killed [rank 1]" in text
    assert text.rstrip().endswith("\x1b[2K"), "the line that moves is erased"


def test_a_run_that_fails_is_told_with_the_agents_last_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fail = [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"]
    monkeypatch.setattr(Settings, "command", lambda self, folder, **_: fail)
    with pytest.raises(demo.DemoFailedError, match="agent ended with 3:\nout of luck"):
        demo.main(["--steps", "20"])
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_costs_no_sample_and_the_end_is_the_same(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--steps", "32", "--save-every", "8", "--json") as process:
        out, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    result = json.loads(out)
    assert result["right"] is True
    assert result["faults"] == []
    assert result["killed"]["rank"] == 1
    assert result["killed"]["step"] >= 12
    assert result["samples"] == {"expected": 512, "used": 512, "lost": 0, "doubled": 0}
    assert 0 <= result["steps_repeated"] <= 8
    assert result["digest"] == result["digest_without_kill"]
    assert result["loss"]["last"] < result["loss"]["first"] - 1.5
    assert all(seconds >= 0 for seconds in result["recovery_seconds"].values())
    assert "killed rank 1" in said
    assert "going on at step" in said
    assert list(tmp_path.iterdir()) == []
    assert not marked(tmp_path.name)


@pytest.mark.timeout(300)
def test_when_it_is_stopped_no_process_and_no_file_is_left(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--steps", "2000") as process:
        wait_for(lambda: list(tmp_path.glob("*/killed/ledger.jsonl")), seconds=100, what="training has begun")
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, said
    assert out.endswith("stopped; nothing is left running\n")
    assert list(tmp_path.iterdir()) == []
    assert not marked(tmp_path.name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_asks_to_stop_is_noted_and_given_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with demo._signals() as noted:
        os.kill(os.getpid(), number)
        wait_for(lambda: noted, seconds=5)
    assert noted == [number]
    assert signal.getsignal(number) is before
