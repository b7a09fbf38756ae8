"""The page as the server sends it, and the bounded past that it draws; what a browser makes of it is test_browser's."""

from __future__ import annotations

import base64
import hashlib
import http.client
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.agent.assembly import http_address
from elastic.metrics import history as histories
from elastic.metrics.history import History, Point, point_of
from elastic.metrics.page import PAGE
from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from elastic.progress import Progress
from elastic.rendezvous.identity import own_identity
from elastic.rendezvous.records import NodeRecord
from elastic.rendezvous.round import Node
from elastic.status import JobStatus

STATUS = JobStatus(run_id="</script><script>", incarnation="a", node_id="n", state="running", round=1, world_size=2)
COMMITS = {"disk": 0.0, "memory": 0.0}


def point(time: float, **fields: Any) -> Point:
    return Point(**{"time": time, "state": "running", "round": 1, "world_size": 2, **fields})


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def server(history: History) -> Iterator[StatusServer]:
    site = Site(status=lambda: STATUS, healthy=lambda: True, points=lambda since: history.to_json(since, 9.0, COMMITS))
    made = StatusServer(bind_tcp("127.0.0.1", 0), None, site)
    yield made
    made.close()


def get(server: StatusServer, path: str) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def test_the_page_is_one_document_that_may_run_and_load_nothing_else(server: StatusServer) -> None:
    code, headers, text = get(server, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        (inner,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert policy[directive] == f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text), "nothing is fetched from elsewhere"
    assert " style=" not in text, "the policy forbids it"


def test_nothing_of_the_job_is_in_the_document_and_its_script_makes_text_of_what_it_gets() -> None:
    text = PAGE.document.decode()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser"):
        assert way not in text
    assert text.count("<script>") == text.count("</script>") == 1


def test_points_are_those_after_the_time_that_is_named(server: StatusServer, history: History) -> None:
    for time in (1.0, 2.0, 3.0):
        history.note(point(time, step=int(time), loss=0.5))
    code, _, body = get(server, "/points?after=1.0")
    told = json.loads(body)
    assert (code, told["now"], told["commits"]) == (200, 9.0, COMMITS)
    assert [dict(zip(told["columns"], row, strict=True))["step"] for row in told["points"]] == [2, 3]
    assert len(json.loads(get(server, "/points")[2])["points"]) == 3


@pytest.mark.parametrize("after", ["yesterday", "nan", "1;2"])
def test_a_time_that_is_none_is_refused_by_name(server: StatusServer, after: str) -> None:
    code, _, body = get(server, f"/points?after={after}")
    assert code == 400
    assert after in body


def test_commands_are_not_taken_over_tcp(server: StatusServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("POST", "/profile?steps=1")
        assert connection.getresponse().status == 501
    finally:
        connection.close()


def test_a_week_is_kept_in_bounded_room_with_its_beginning_and_its_last_minutes(history: History) -> None:
    week = 7 * 86400
    for second in range(0, week, 10):
        history.note(point(float(second), step=second))
    kept = history.since(-1.0)
    assert len(kept) <= histories.RECENT_POINTS + histories.WHOLE_POINTS
    times = [each.time for each in kept]
    assert times == sorted(set(times))
    assert times[0] == 0
    assert times[-1] == week - 10
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < week / 200
    assert len([time for time in times if time > week - 600]) == 59, "the last minutes are there in full"


def test_a_moment_is_due_each_second_and_when_state_or_round_change(history: History) -> None:
    assert history.is_due(10.0, STATUS)
    history.note(point(10.0))
    assert not history.is_due(10.5, STATUS)
    assert history.is_due(11.0, STATUS)
    other_round = JobStatus(run_id="r", incarnation="a", node_id="n", state="running", round=2)
    other_state = JobStatus(run_id="r", incarnation="a", node_id="n", state="stopped", round=1)
    assert history.is_due(10.5, other_round)
    assert history.is_due(10.5, other_state)


def test_a_clock_that_is_set_back_does_not_stop_the_curve(history: History) -> None:
    history.note(point(1000.0))
    history.note(point(1001.0))
    assert history.is_due(500.0, STATUS)
    history.note(point(500.0))
    history.note(point(501.0))
    assert [each.time for each in history.since(0.0)] == [500.0, 501.0]


def test_a_point_is_of_the_rank_that_is_behind_and_knows_what_is_not_known() -> None:
    began = Progress(pid=1, in_loop=1, step=7, first_step_at=1.0, loss=2.0, step_seconds=0.2)
    ahead = Progress(pid=2, in_loop=1, step=9, first_step_at=1.0, loss=1.0, step_seconds=0.3)
    made = point_of(1.0, STATUS, [ahead, began], 0.9)
    assert (made.step, made.loss, made.step_seconds, made.goodput) == (7, 2.0, 0.3, 0.9)
    restored = point_of(1.0, STATUS, [Progress(pid=1, in_loop=1, step=7)], math.nan)
    assert (restored.step, restored.loss, restored.step_seconds, restored.goodput) == (7, None, None, None)
    assert point_of(1.0, STATUS, [], math.nan).step is None


@pytest.mark.parametrize(
    ("host", "port", "node", "address"),
    [
        ("0.0.0.0", 9431, "10.0.0.7", "10.0.0.7:9431"),
        ("::", 9431, "fd00::7", "[fd00::7]:9431"),
        ("node7.cluster", 9431, "10.0.0.7", "node7.cluster:9431"),
        ("127.0.0.1", 9431, "10.0.0.7", ""),
        ("localhost", 9431, "10.0.0.7", ""),
        ("127.0.0.1", 9431, "127.0.0.1", "127.0.0.1:9431"),
        ("0.0.0.0", 0, "10.0.0.7", ""),
    ],
)
def test_a_node_names_the_address_at_which_others_reach_its_page(host: str, port: int, node: str, address: str) -> None:
    assert http_address(host, port, node) == address


def test_a_node_record_of_a_version_that_named_no_address_is_read_all_the_same() -> None:
    record = NodeRecord(node=Node(node_id="n", addr="a", slots=1, http="a:1"), identity=own_identity())
    old = json.loads(record.to_json())
    del old["node"]["http"]
    assert NodeRecord.from_json(json.dumps(old)).node.http == ""
    assert NodeRecord.from_json(record.to_json()).node.http == "a:1"
