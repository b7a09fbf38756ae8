"""`--log-format json`: one object a line, with what the line speaks of."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.cli import main
from elastic.journal import JournalFormatter
from elastic.journal_json import LOGGERS, JsonFormatter, log_as_json, name_node
from tests.support.job import write


def formatted(message: str, *args: object, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("elastic.agent.agent", logging.WARNING, __file__, 1, message, args, exc_info)
    line = JsonFormatter(run_id="train", node_id="n1").format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("round 3: rank 1 has ended: SIGKILL", {"round": 3, "rank": 1}),
        ("run=x round=2 rank=0 step=17 training begins", {"round": 2, "rank": 0, "step": 17}),
        ("received SIGTERM", {}),
        ("round 2: it failed\n    rank 7 said step 9", {"round": 2}),
        ("the rounds 3 and frank 4", {}),
    ],
)
def test_what_a_line_names_are_fields(message: str, named: dict[str, int]) -> None:
    told = formatted(message)
    time = datetime.datetime.fromisoformat(told.pop("time").replace("Z", "+00:00"))
    assert time.tzinfo is not None
    ids = {"level": "WARNING", "logger": "elastic.agent.agent", "run_id": "train", "node_id": "n1"}
    assert told == {**ids, "message": message, **named}


def test_a_traceback_stays_in_its_object() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        told = formatted("no luck", exc_info=sys.exc_info())
    assert "ValueError: broken" in told["exception"]


def test_the_journal_still_learns_the_priority_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JournalFormatter())
    for name in LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    log_as_json(run_id="train", node_id="n1")
    line = handler.format(logging.LogRecord("elastic", logging.ERROR, "", 1, "no luck", (), None))
    assert line.startswith("<3>{")
    assert json.loads(line[3:])["message"] == "no luck"


def test_a_node_that_had_to_take_another_id_says_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    for name in LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    name_node("n1-2")  # plain lines have no id
    log_as_json(run_id="train", node_id="n1")
    record = logging.LogRecord("elastic", logging.INFO, "", 1, "round 1 begins", (), None)
    assert json.loads(handler.format(record))["node_id"] == "n1"
    name_node("n1-2")
    assert json.loads(handler.format(record))["node_id"] == "n1-2"


def test_the_agents_lines_are_json_when_it_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "train.py", "")
    monkeypatch.chdir(tmp_path)
    ours = [logging.getLogger(name) for name in LOGGERS]
    before = [(each.handlers, each.level, each.propagate) for each in ours]

    def run_job(_: object) -> int:
        logging.getLogger("elastic.agent").info("round %d: it runs\nwell", 1)
        return 0

    monkeypatch.setattr("elastic.agent.launch.run_job", run_job)
    try:
        assert main(["run", "--log-format", "json", "--node-id", "n1", "train.py"]) == 0
    finally:
        for each, (handlers, level, propagate) in zip(ours, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["run_id"], told["node_id"], told["round"]) == ("train", "n1", 1)
    assert told["message"] == "round 1: it runs\nwell"
