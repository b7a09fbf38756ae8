"""Log lines as JSON, one object a line (`--log-format json`): for journald and whatever collects and searches logs."""

from __future__ import annotations

import datetime
import json
import logging
import re
from typing import Any

from elastic.journal import JournalFormatter, priority

LOGGERS = ("elastic", "checkpoints")
# How our lines name things (style: "round 3: rank 1 ...", "run=x round=3 rank=1 step=7 ..."); the first line counts.
_NAMED = {key: re.compile(rf"\b{key}[ =](\d+)\b") for key in ("round", "rank", "step")}


class JsonFormatter(logging.Formatter):
    """`run_id` and `node_id` are on every line; round, rank and step where the message names them.

    `is_journal`: with the priority in front, which the journal takes off again.
    """

    def __init__(self, *, run_id: str, node_id: str, is_journal: bool = False) -> None:
        super().__init__()
        self.run_id, self.node_id = run_id, node_id
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            "run_id": self.run_id,
            "node_id": self.node_id,
        }
        head = message.partition("\n")[0]
        for key, pattern in _NAMED.items():
            if (found := pattern.search(head)) is not None:
                line[key] = int(found[1])
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return (priority(record) if self._is_journal else "") + json.dumps(line, ensure_ascii=False)


_in_use: list[JsonFormatter] = []  # the handlers may be out of sight: a thread may serve them


def log_as_json(*, run_id: str, node_id: str) -> None:
    """From now on the handlers of our loggers write JSON."""
    handlers = {handler for name in LOGGERS for handler in logging.getLogger(name).handlers}  # they share one
    for handler in handlers:
        is_journal = isinstance(handler.formatter, JournalFormatter)
        formatter = JsonFormatter(run_id=run_id, node_id=node_id, is_journal=is_journal)
        handler.setFormatter(formatter)
        _in_use.append(formatter)


def name_node(node_id: str) -> None:
    """The node is called that from now on: a live duplicate had the id that was configured."""
    for formatter in _in_use:
        formatter.node_id = node_id
