"""What the agent's HTTP server answers at which path; `server.py` owns how."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from elastic.metrics.page import PAGE
from elastic.status import JobStatus

_JSON = "application/json"


class Answer(NamedTuple):
    """What is sent back for one path."""

    code: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class Ask(NamedTuple):
    """What a client may say beside the path."""

    accept: str = ""
    query: str = ""

    def value(self, name: str) -> str:
        """Of the query; empty where it is not named."""
        return dict(parse_qsl(self.query)).get(name, "")


Route = Callable[[Ask], Answer]
Target = dict[str, Any]  # as Prometheus' HTTP service discovery wants it


def target(address: str, *, run_id: str, node_id: str) -> Target:
    """One agent. Its names are for relabelling alone: the series have them in `job_info`."""
    return {"targets": [address], "labels": {"__meta_elasticd_run_id": run_id, "__meta_elasticd_node_id": node_id}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The callables run on connection threads, so they must be thread-safe. What is None is not served."""

    status: Callable[[], JobStatus]
    healthy: Callable[[], bool]
    metrics: Callable[[str], tuple[bytes, str]] | None = None  # (body, content type) for an Accept header
    points: Callable[[float], str] | None = None  # JSON of what has happened since a unix time
    targets: Callable[[], Sequence[Target]] | None = None
    controls: Mapping[str, Route] = dataclasses.field(default_factory=dict)  # POST, on the unix socket alone

    def routes(self) -> dict[str, Route]:
        """Path -> what answers a GET."""
        routes: dict[str, Route] = {"/healthz": self._healthz, "/readyz": self._readyz, "/status": self._status}
        if self.metrics is not None:
            metrics = self.metrics
            routes["/metrics"] = lambda ask: Answer(200, *metrics(ask.accept))
        if self.targets is not None:
            targets = self.targets
            routes["/sd"] = lambda _: Answer(200, json_line(targets()), _JSON)
        if self.points is not None:
            routes["/"] = _page
            routes["/points"] = self._points
        return routes

    def _healthz(self, _: Ask) -> Answer:
        return Answer(200, b"ok\n") if self.healthy() else Answer(503, b"the agent's loop is stuck\n")

    def _readyz(self, _: Ask) -> Answer:
        state = self.status().state
        return Answer(200 if state == "running" else 503, f"{state}\n".encode())

    def _status(self, _: Ask) -> Answer:
        return Answer(200, json_line(self.status().to_json()), _JSON)

    def _points(self, ask: Ask) -> Answer:
        given = ask.value("after")
        try:
            after = float(given or 0.0)
        except ValueError:
            after = math.nan
        if math.isnan(after) or self.points is None:
            return Answer(400, f"after={given[:50]!r} is no time; give unix seconds\n".encode())
        return Answer(200, self.points(after).encode(), _JSON)


def json_line(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _page(_: Ask) -> Answer:
    return Answer(200, PAGE.document, "text/html; charset=utf-8", PAGE.headers)
