"""Restarts, lost steps and recovery times, counted from one status after another."""

from __future__ import annotations

import pytest

from elastic.metrics.job_record import JobRecord, reason_of
from elastic.metrics.measured import REASONS
from elastic.status import Incident, IncidentSeconds, JobStatus, WorkerStatus


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("rank 3 exited: ValueError: lost my way", "worker_failed"),
        ("rank 0 killed by SIGKILL", "worker_failed"),
        ("rank 1 out of memory: killed by the kernel's OOM killer: give the host more memory", "out_of_memory"),
        ("rank 1 exited: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory"),
        ("rank 2 hung: no progress for 30 s in data", "hung"),
        ("node a hung: all its ranks wait", "hung"),
        ("node a lost", "node_lost"),
        ("nodes a, b lost, node c left", "node_lost"),
        ("node a left", "node_left"),
        ("node a leaves", "node_left"),
        ("nodes a, b join", "node_joined"),
        ("node c joins", "node_joined"),
        ("node a: the agent did not run for 6.1 s", "fenced"),
        ("node a: etcd could not be reached to renew the lease", "fenced"),
        ("node a: it was stopped", "fenced"),
        ("cannot start a worker: [Errno 12] Cannot allocate memory", "worker_failed"),
        ("started", "other"),
        ("", "other"),
    ],
)
def test_causes_become_few_reasons(cause: str, reason: str) -> None:
    assert reason_of(cause) == reason
    assert reason in REASONS


def status(round: int, *incidents: Incident, workers: int = 0) -> JobStatus:
    return JobStatus(
        run_id="r",
        incarnation="i",
        node_id="n",
        state="running",
        round=round,
        incidents=incidents,
        workers=tuple(WorkerStatus(local_rank=n) for n in range(workers)),
    )


def recovered(round: int, lost: int = 3) -> Incident:
    seconds = IncidentSeconds(detect=0.1, stop=0.2, rendezvous=0.3, start=0.4, restore=0.5, first_step=0.6, total=2.1)
    return Incident(time=float(round), cause="node a lost", round=round, lost_steps=lost, seconds=seconds)


def test_a_round_that_follows_another_is_one_restart_and_the_first_is_none() -> None:
    record = JobRecord(0.0)
    for number in (0, 4, 4, 5):
        record.note(status(number), cause="node a lost", is_leader=True, now=1.0)
    restarts = record.totals().restarts
    assert restarts["node_lost"] == 1
    assert sum(restarts.values()) == 1
    assert tuple(restarts) == REASONS


def test_an_incident_counts_once_when_it_is_over() -> None:
    record = JobRecord(0.0)
    under_way = Incident(time=2.0, cause="x", round=2, lost_steps=3)
    for incidents in ((under_way,), (recovered(2),), (recovered(2),), (recovered(2), recovered(3, lost=1))):
        record.note(status(3, *incidents), cause="x", is_leader=True, now=1.0)
    totals = record.totals()
    assert totals.lost_steps == 4
    assert totals.recovery["total"].count == 2
    assert totals.recovery["restore"].sum == pytest.approx(1.0)


def test_only_the_leader_counts_for_the_job() -> None:
    record = JobRecord(0.0)
    record.note(status(1), cause="started", is_leader=False, now=1.0)
    record.note(status(2, recovered(2)), cause="node a lost", is_leader=False, now=2.0)
    record.note(status(2, recovered(2)), cause="node a lost", is_leader=True, now=2.0)
    totals = record.totals()
    assert sum(totals.restarts.values()) == totals.lost_steps == totals.recovery["total"].count == 0
    assert totals.rendezvous.count == 1  # each node's own


def test_the_first_rendezvous_takes_from_the_agents_start_to_its_first_workers() -> None:
    record = JobRecord(10.0)
    record.note(status(0), cause="", is_leader=True, now=11.0)
    for now in (14.0, 15.0):
        record.note(status(1, workers=2), cause="started", is_leader=True, now=now)
    assert (record.totals().rendezvous.count, record.totals().rendezvous.sum) == (1, 4.0)
