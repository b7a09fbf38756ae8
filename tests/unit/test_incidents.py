"""Incidents: marks become phases that add up; what is not known yet is None, never a guess."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.agent.incidents import Incidents
from elastic.progress import Progress


def report(**fields: float) -> Progress:
    return Progress(**{"pid": 1, "started_at": 105.0, "in_loop": 1, **fields})  # type: ignore[arg-type]


FIRST = report(restore_began_at=106.0, restore_ended_at=107.0, first_step_at=108.0, base_step=10, step=11)
SLOWER = report(restore_began_at=106.5, restore_ended_at=107.5, first_step_at=108.5, base_step=10, step=11)


def told(*, stopped: float = 102.0, decided: float = 103.0) -> Incidents:
    incidents = Incidents()
    incidents.begin(cause="c", applied_step=14, failed_at=100.0, now=101.0)
    incidents.stopped(stopped)
    incidents.decided(7, decided, "c")
    return incidents


def test_phases_add_up_to_the_total_and_the_slowest_rank_counts() -> None:
    incident = told().observe([FIRST, SLOWER])
    assert incident is not None
    seconds = dataclasses.asdict(incident.seconds)
    total = seconds.pop("total")
    assert seconds == {"detect": 1, "stop": 1, "rendezvous": 1, "start": 3.5, "restore": 1, "first_step": 1}
    assert sum(seconds.values()) == pytest.approx(total)
    assert (incident.round, incident.lost_steps, incident.cause) == (7, 4, "c")


def test_it_stays_open_until_every_worker_has_applied_a_new_step() -> None:
    incidents = told()
    assert incidents.observe([FIRST, dataclasses.replace(SLOWER, first_step_at=0.0)]) is None
    (shown,) = incidents.all([FIRST, dataclasses.replace(SLOWER, first_step_at=0.0)])
    assert shown.seconds.total is None
    assert incidents.observe([FIRST, SLOWER]) is not None
    assert len(incidents.all([])) == 1


def test_a_second_failure_before_the_recovery_belongs_to_the_same_incident() -> None:
    incidents = told()
    incidents.begin(cause="again", applied_step=-1, failed_at=104.0, now=104.0)
    incidents.stopped(104.2)
    incidents.decided(8, 104.5, "d")
    incident = incidents.observe([FIRST, SLOWER])
    assert incident is not None
    assert (incident.cause, incident.round, incident.lost_steps) == ("c", 8, 4)
    assert incident.seconds.total == pytest.approx(8.5)


def test_the_next_rounds_cause_stands_unless_this_node_knows_better() -> None:
    for is_known, cause in ((False, "nodes a, b lost"), (True, "the store was away")):
        incidents = Incidents()
        incidents.begin(cause="the store was away", applied_step=1, failed_at=1.0, now=1.0, is_known=is_known)
        incidents.decided(7, 103.0, "nodes a, b lost")
        incidents.name("a failure that followed")
        assert [incident.cause for incident in incidents.all([])] == [cause]


def test_reports_of_the_old_round_close_nothing() -> None:
    stale = dataclasses.replace(FIRST, started_at=50.0, first_step_at=60.0)
    assert told().observe([stale, stale]) is None


def test_without_a_session_only_what_the_agent_itself_saw_is_known() -> None:
    (shown,) = told().all([Progress(), Progress()])
    assert (shown.seconds.stop, shown.seconds.start, shown.seconds.total, shown.lost_steps) == (1.0, None, None, None)


def test_without_a_session_the_next_failure_is_another_incident() -> None:
    incidents, silent = told(), [Progress(), Progress()]
    incidents.begin(cause="again", applied_step=-1, failed_at=150.0, now=150.5, reports=silent)
    incidents.begin(cause="the same", applied_step=-1, failed_at=150.7, now=150.7, reports=silent)
    incidents.stopped(151.0)
    first, second = incidents.all(silent)
    assert (first.cause, first.seconds.stop, first.seconds.total) == ("c", 1.0, None)
    assert (second.cause, second.seconds.stop) == ("again", 0.5)


def test_how_long_ago_it_began_is_known_and_who_begins_it() -> None:
    incidents = Incidents()
    assert incidents.age(50.0) == 0.0
    assert incidents.begin(cause="c", applied_step=14, failed_at=100.0, now=106.0)
    assert not incidents.begin(cause="d", applied_step=14, failed_at=107.0, now=107.0)
    assert incidents.age(106.0) == 6.0
