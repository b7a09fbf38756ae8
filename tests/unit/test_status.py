"""The job's status is exactly the JSON that users script against, and comes back from it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from elastic.cli_status import render
from elastic.status import (
    CheckpointStatus,
    FailureStatus,
    Incident,
    IncidentSeconds,
    JobStatus,
    NodeStatus,
    RestartStatus,
    WaitingStatus,
    WorkerStatus,
)

FULL = JobStatus(
    run_id="train",
    incarnation="1a2b",
    node_id="n0",
    state="running",
    round=3,
    base_step=100,
    world_size=2,
    outcome=None,
    nodes=(NodeStatus(node_id="n0", node_rank=0, addr="10.0.0.1", ranks=(0, 1), http="10.0.0.1:9431"),),
    waiting=(WaitingStatus(node_id="n1", reason="more than MAX"),),
    workers=(
        WorkerStatus(
            local_rank=0, rank=0, pid=71, state="running", step=120, age_seconds=0.25, slowdown=1.5, standby=True
        ),
    ),
    restarts=RestartStatus(used=1, limit=3, window_seconds=600.0),
    checkpoint=CheckpointStatus(disk_step=110, memory_step=None),
    last_failure=FailureStatus(
        rank=1, node_id="n0", reason="killed", exit_code=None, signal="SIGKILL", message="gone", log="line\nline 2"
    ),
    incidents=(
        Incident(
            time=1.5, cause="worker failed", round=3, lost_steps=4, seconds=IncidentSeconds(detect=0.01, total=0.5)
        ),
    ),
    nccl={"NCCL_ALGO": "Ring"},
    cause="rank 1 killed by SIGKILL",
)

AS_JSON: dict[str, Any] = {
    "run_id": "train",
    "incarnation": "1a2b",
    "node_id": "n0",
    "state": "running",
    "round": 3,
    "base_step": 100,
    "world_size": 2,
    "outcome": None,
    "nodes": [{"node_id": "n0", "node_rank": 0, "addr": "10.0.0.1", "ranks": [0, 1], "http": "10.0.0.1:9431"}],
    "waiting": [{"node_id": "n1", "reason": "more than MAX"}],
    "workers": [
        {
            "local_rank": 0,
            "rank": 0,
            "pid": 71,
            "state": "running",
            "step": 120,
            "age_seconds": 0.25,
            "slowdown": 1.5,
            "standby": True,
        }
    ],
    "restarts": {"used": 1, "limit": 3, "window_seconds": 600.0},
    "checkpoint": {"disk_step": 110, "memory_step": None, "failed_saves": 0},
    "last_failure": {
        "rank": 1,
        "node_id": "n0",
        "reason": "killed",
        "exit_code": None,
        "signal": "SIGKILL",
        "message": "gone",
        "log": "line\nline 2",
    },
    "incidents": [
        {
            "time": 1.5,
            "cause": "worker failed",
            "round": 3,
            "lost_steps": 4,
            "seconds": {
                "detect": 0.01,
                "stop": None,
                "rendezvous": None,
                "start": None,
                "restore": None,
                "first_step": None,
                "total": 0.5,
            },
        }
    ],
    "nccl": {"NCCL_ALGO": "Ring"},
    "cause": "rank 1 killed by SIGKILL",
}
EMPTY = JobStatus(run_id="train", incarnation="", node_id="n0", state="joining")


def test_json_has_exactly_the_fields_of_the_contract_in_their_order() -> None:
    assert json.dumps(FULL.to_json()) == json.dumps(AS_JSON)


@pytest.mark.parametrize("status", [FULL, EMPTY], ids=["full", "empty"])
def test_a_status_survives_the_way_through_json(status: JobStatus) -> None:
    assert JobStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_keys_of_a_newer_agent_are_ignored() -> None:
    raw = FULL.to_json()
    raw["mood"] = "good"
    raw["workers"][0]["colour"] = "red"
    assert JobStatus.from_json(raw) == FULL


@pytest.mark.parametrize(
    "raw", [{}, {"run_id": 1}, [], "x", None, AS_JSON | {"nodes": 3}, AS_JSON | {"restarts": None}]
)
def test_what_is_no_status_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="not a job status"):
        JobStatus.from_json(raw)


def test_the_view_for_people_shows_every_part() -> None:
    shown = render(FULL, 4711)
    for part in (
        "job train: running",
        "round 3: rank 1 killed by SIGKILL",
        "4711",
        "n1",
        "more than MAX",
        "120",
        "restarts 1 of 3",
        "newest committed step: 110",
    ):
        assert part in shown
    assert "last failure: rank 1 on n0 killed (SIGKILL)\n  gone\n  line\n  line 2" in shown
    assert "worker failed" in shown


GLOO = (
    "rank 0 exited: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer [127.0.0.1]:41. This may come from another rank that has failed: look at its log first"
)


def test_a_long_cause_is_cut_for_people_and_whole_in_json() -> None:
    incident = dataclasses.replace(FULL.incidents[0], cause=GLOO)
    status = dataclasses.replace(FULL, cause=GLOO, incidents=(incident,), last_failure=None)
    for shown in (render(status, 4711), render(status, None)):  # an agent's view, and etcd's
        assert "rank 0 exited: RuntimeError: Connection closed by peer [1...  " in shown
        assert "round 3: rank 0 exited: RuntimeError: Connection closed by peer [127.0.0.1]:41. This may" in shown
        assert max(map(len, shown.splitlines())) <= 170
    assert status.to_json()["cause"] == status.to_json()["incidents"][0]["cause"] == GLOO


def test_the_view_of_an_agent_that_just_started_is_short() -> None:
    shown = render(EMPTY, 1)
    assert len(shown.splitlines()) == 3
    assert "None" not in shown
