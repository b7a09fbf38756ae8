"""Several members as threads of one process, on the store in memory and on a real etcd: whole stories of a job."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ExitCode, NotEnoughNodesError, UsageError
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.records import Keys
from elastic.rendezvous.round import Limits
from elastic.rendezvous.store import Put
from tests.rendezvous.peers import DEAD_PID, RULES, TTL, Job, all_run
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.fake_store import FakeServer, FakeStore


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(Path(tmp_path_factory.mktemp("etcd")) / "etcd") as cluster:
        yield cluster


_names = itertools.count()


@pytest.fixture
def job() -> Iterator[Job]:
    server = FakeServer(at_once=True)
    made = Job(lambda: FakeStore(server), "job")
    yield made
    made.close()


@pytest.fixture(params=["memory", "etcd"])
def any_job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """On either store; for the stories that depend most on how a store behaves."""
    if request.param == "memory":
        yield request.getfixturevalue("job")
        return
    cluster: EtcdCluster = request.getfixturevalue("cluster")
    made = Job(lambda: open_store(cluster.config()), f"job{next(_names)}")
    yield made
    made.close()


def test_nodes_form_one_round_with_distinct_ranks_and_one_store(any_job: Job) -> None:
    peers = [any_job.start(name) for name in "abc"]
    took = any_job.until(all_run(peers))
    assert took < 3.0
    assert sorted(peer.view.node_rank for peer in peers if peer.view.node_rank is not None) == [0, 1, 2]
    assert len({(peer.view.store_addr, peer.view.store_port, peer.view.incarnation) for peer in peers}) == 1
    assert sum(peer.view.is_leader for peer in peers) == 1


def test_with_fewer_than_max_the_last_call_is_waited_for_and_shown(job: Job) -> None:
    rules = dataclasses.replace(RULES, last_call_seconds=1.0)
    peers = [job.start(name, rules=rules) for name in "ab"]
    job.until(lambda: any("last call" in waiting.reason for waiting in peers[0].view.waiting))
    assert job.until(all_run(peers)) < 4.0


def test_a_worker_failure_reaches_the_peers_at_once_and_costs_one_charge(any_job: Job) -> None:
    peers = [any_job.start(name) for name in "abc"]
    any_job.until(all_run(peers))
    before, number = {peer.name: peer.view.node_rank for peer in peers}, peers[0].running
    peers[1].fail()
    assert any_job.until(lambda: not any(peer.running == number for peer in peers)) < TTL
    any_job.until(all_run(peers))
    assert {peer.name: peer.view.node_rank for peer in peers} == before
    assert peers[0].running == number + 1
    any_job.until(lambda: all(peer.view.restarts_used == 1 for peer in peers))
    assert all(peer.round and peer.round.cause == "b failed" for peer in peers)


@pytest.mark.parametrize("victim", ["leader", "other"])
def test_a_lost_node_is_noticed_by_its_lease_and_is_not_charged(any_job: Job, victim: str) -> None:
    peers = [any_job.start(name) for name in "abc"]
    any_job.until(all_run(peers))
    lost = next(peer for peer in peers if peer.view.is_leader == (victim == "leader"))
    lost.vanish()
    rest = [peer for peer in peers if peer is not lost]
    any_job.until(all_run(rest))
    current = rest[0].round
    assert current is not None
    assert current.cause == f"node {lost.name} lost"
    assert rest[0].view.restarts_used == 0


def test_a_failure_that_follows_from_a_lost_node_is_not_charged(job: Job) -> None:
    a, b = job.start("a"), job.start("b")
    job.until(all_run([a, b]))
    b.vanish()
    a.fail(consequence=True)
    job.until(all_run([a]))
    assert (a.view.restarts_used, a.round and a.round.cause) == (0, "node b lost")


def test_a_newcomer_is_let_in_by_a_drain_once_it_is_ready(any_job: Job) -> None:
    a = any_job.start("a")
    any_job.until(all_run([a]))
    b = any_job.start("b", ready=False)
    any_job.until(lambda: any(w.node_id == "b" and "getting ready" in w.reason for w in a.view.waiting))
    assert a.running == 1
    b.member.ready()
    any_job.until(all_run([a, b]))
    assert (a.drained, a.running, a.view.node_rank, b.view.node_rank) == (1, 2, 0, 1)
    assert (2, "broken") not in a.history


def test_two_newcomers_in_one_moment_cost_one_round(job: Job) -> None:
    rules = dataclasses.replace(RULES, settle_seconds=1.0)
    a = job.start("a", rules=rules)
    job.until(all_run([a]))
    b, c = job.start("b", rules=rules), job.start("c", rules=rules)
    job.until(all_run([a, b, c]))
    assert a.running == 2


def test_more_than_max_is_a_spare_which_takes_a_lost_seat_and_ends_with_the_job(any_job: Job) -> None:
    rules = dataclasses.replace(RULES, limits=Limits(min_nodes=2, max_nodes=2))
    peers = [any_job.start(name, rules=rules) for name in "abc"]
    any_job.until(lambda: sum(peer.running == 1 for peer in peers) == 2 and any(p.view.is_spare for p in peers))
    spare = next(peer for peer in peers if peer.view.is_spare)
    lost, stays = (peer for peer in peers if peer is not spare)
    lost.vanish()
    any_job.until(all_run([stays, spare]))
    assert spare.running == 2
    late = any_job.start("d", rules=rules)
    any_job.until(lambda: late.view.is_spare)
    stays.finish()
    spare.finish()
    any_job.until(lambda: late.view.outcome == stays.view.outcome == spare.view.outcome == "succeeded")


def test_leaving_on_term_takes_effect_at_once_and_is_not_charged(any_job: Job) -> None:
    peers = [any_job.start(name) for name in "abc"]
    any_job.until(all_run(peers))
    leaver = next(peer for peer in peers if peer.view.is_leader)
    leaver.go()
    rest = [peer for peer in peers if peer is not leaver]
    assert any_job.until(all_run(rest)) < TTL
    assert rest[0].view.restarts_used == 0


def test_an_agent_started_again_within_the_ttl_takes_its_id_over_at_once(any_job: Job) -> None:
    a, b = any_job.start("a"), any_job.start("b", pid=DEAD_PID)
    any_job.until(all_run([a, b]))
    rank = b.view.node_rank
    b.vanish()
    again = any_job.start("b")
    assert any_job.until(all_run([a, again])) < TTL
    assert (again.view.node_id, again.view.node_rank) == ("b", rank)


def test_a_live_duplicate_gets_a_name_of_its_own(any_job: Job) -> None:
    peers = [any_job.start("a"), any_job.start("a"), any_job.start("a")]
    any_job.until(all_run(peers))
    assert {peer.view.node_id for peer in peers} == {"a", "a-2", "a-3"}


def test_success_needs_all_members_and_who_is_done_joins_again_when_a_peer_fails(any_job: Job) -> None:
    a, b = any_job.start("a"), any_job.start("b")
    any_job.until(all_run([a, b]))
    number = a.running
    a.finish()
    b.fail()
    any_job.until(all_run([a, b]))
    assert a.running == number + 1
    a.finish()
    b.finish()
    any_job.until(lambda: a.view.outcome == b.view.outcome == "succeeded")


def test_a_fatal_failure_closes_the_job_everywhere_with_its_exit_code(job: Job) -> None:
    a, b = job.start("a"), job.start("b")
    job.until(all_run([a, b]))
    a.fail(fatal=True, exit_code=78)
    job.until(lambda: not b.running and b.view.outcome == "failed")
    assert b.view.exit_code == 78


def test_the_budget_is_one_for_all_nodes_and_exact(any_job: Job) -> None:
    rules = dataclasses.replace(RULES, max_restarts=2)
    a, b = any_job.start("a", rules=rules), any_job.start("b", rules=rules)
    numbers = []
    for culprit in (a, b, a):
        any_job.until(all_run([a, b]))
        numbers.append(a.running)
        culprit.fail()
    any_job.until(lambda: a.view.outcome == b.view.outcome == "failed")
    assert a.round is not None
    assert "budget" in a.round.cause
    assert [number - numbers[0] for number in (*numbers, a.round.number)] == [0, 1, 2, 2]


def test_failures_without_progress_are_slowed_down_visibly(job: Job) -> None:
    rules = dataclasses.replace(RULES, max_restarts=100)
    a, b = job.start("a", rules=rules), job.start("b", rules=rules)
    job.until(all_run([a, b]))
    a.fail(progressed=False)
    job.until(all_run([a, b]))
    pauses = []
    for _ in range(3):
        b.fail(progressed=False)
        pauses.append(job.until(all_run([a, b])))
    assert 0.25 <= pauses[0] < pauses[2]
    assert pauses[2] >= 1.0
    a.fail(progressed=False)
    job.until(lambda: any("back-off" in waiting.reason for waiting in a.view.waiting))


@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_a_second_start_after_the_end_opens_a_new_incarnation_with_a_fresh_budget(job: Job, end: str) -> None:
    a = job.start("a")
    job.until(all_run([a]))
    a.fail()
    job.until(lambda: a.running == 2)
    first = a.view.incarnation
    if end == "succeeded":
        a.finish()
    else:
        a.fail(fatal=True)
    job.until(lambda: a.view.outcome == end)
    again = job.start("b")
    job.until(lambda: a.view.outcome == end)
    a.leave()
    job.until(all_run([again]))
    assert again.view.incarnation != first
    assert (again.running, again.view.restarts_used) == (3, 0)


def test_an_agent_restarted_into_a_closed_incarnation_takes_its_outcome(job: Job) -> None:
    a = job.start("a")
    job.until(all_run([a]))
    a.fail(fatal=True)
    job.until(lambda: a.view.outcome == "failed")
    a.leave()
    again = job.start("a", restarted=True)
    job.until(lambda: again.view.outcome == "failed")
    assert not again.started


def test_after_everything_was_killed_a_start_opens_a_new_incarnation(job: Job) -> None:
    a = job.start("a", pid=DEAD_PID)
    job.until(all_run([a]))
    first = a.view.incarnation
    a.vanish()
    again = job.start("a")
    job.until(all_run([again]))
    assert (again.running, again.view.incarnation == first) == (2, False)


def test_an_agent_restarted_after_everything_was_killed_goes_on_with_the_incarnation(job: Job) -> None:
    a = job.start("a", pid=DEAD_PID)
    job.until(all_run([a]))
    first = a.view.incarnation
    a.vanish()
    again = job.start("a", restarted=True)
    job.until(all_run([again]))
    assert (again.running, again.view.incarnation) == (2, first)


def test_too_few_nodes_for_too_long_is_an_error_that_says_how_many(job: Job) -> None:
    rules = dataclasses.replace(RULES, limits=Limits(min_nodes=2, max_nodes=2))
    a = job.start("a", rules=rules, join_timeout=1.0)
    job.until(lambda: any("1 of 2 nodes" in waiting.reason for waiting in a.view.waiting))
    job.until(lambda: a.view.error is not None)
    error = a.view.error
    assert isinstance(error, NotEnoughNodesError)
    assert "1 of 2" in str(error)


def test_min_not_reached_for_a_while_waits_and_then_goes_on(job: Job) -> None:
    rules = dataclasses.replace(RULES, limits=Limits(min_nodes=2, max_nodes=3))
    a, b = job.start("a", rules=rules), job.start("b", rules=rules)
    job.until(all_run([a, b]))
    rank = a.view.node_rank
    b.go()
    job.until(lambda: any("1 of 2 nodes" in waiting.reason for waiting in a.view.waiting))
    c = job.start("c", rules=rules, ready=False)  # nothing runs that it could disturb: it need not be ready
    job.until(all_run([a, c]))
    assert a.view.node_rank == rank


def test_other_settings_are_refused_by_name_and_do_not_disturb_the_job(job: Job) -> None:
    a = job.start("a")
    job.until(all_run([a]))
    b = job.start("b", rules=dataclasses.replace(RULES, settings="--settle=9"))
    job.until(lambda: any("--settle=9 instead of" in waiting.reason for waiting in a.view.waiting))
    job.until(lambda: b.view.error is not None)
    error = b.view.error
    assert isinstance(error, UsageError)
    assert error.exit_code is ExitCode.USAGE
    assert "--settle=9 instead of" in str(error)
    assert "rdzv-id" in str(error)
    assert a.running == 1


@pytest.mark.parametrize(
    ("program", "said"), [("eval.py 5a", "eval.py, not train.py"), ("train.py 77", "train.py with other arguments")]
)
def test_another_program_on_a_node_is_let_in_and_said_once(
    job: Job, caplog: pytest.LogCaptureFixture, program: str, said: str
) -> None:
    a = job.start("a")
    job.until(all_run([a]))
    b = job.start("b", program=program)
    c = job.start("c")
    job.until(all_run([a, b, c]))
    a.fail()
    job.until(lambda: all(peer.running > 2 for peer in (a, b, c)))
    (warned,) = [record.getMessage() for record in caplog.records if "the arguments of node a" in record.getMessage()]
    assert warned.startswith(f"node b runs {said}: ")


@pytest.mark.parametrize(
    "evil", ["", "[" * 100_000, '{"node": {"node_id": "evil", "addr": 1}}', "slots", "name", "leader"]
)
def test_a_record_that_nobody_can_have_meant_is_named_and_stops_nobody(
    job: Job, caplog: pytest.LogCaptureFixture, evil: str
) -> None:
    a, b = job.start("a"), job.start("b")
    job.until(all_run([a, b]))
    keys, store = Keys(job.run_id), job.connect()
    key = keys.leader if evil == "leader" else keys.node("evil")
    if evil in ("slots", "name", "lease", "leader"):
        good = store.read(keys.node("b")).entries[keys.node("b")].value
        evil = {
            "slots": good.replace('"slots":1', '"slots":"1"'),
            "name": good,
            "lease": good.replace('"node_id":"b"', '"node_id":"evil"'),
            "leader": "[",
        }[evil]
    store.write([], [Put(key, evil)])
    store.close()
    job.until(lambda: any(key in record.getMessage() or "news" in record.getMessage() for record in caplog.records))
    b.fail()
    job.until(lambda: a.running > 1 and b.running > 1)
    assert {member.node_id for member in a.view.round.members} == {"a", "b"}  # type: ignore[union-attr]


def test_nothing_but_a_few_keys_is_left_of_many_rounds(any_job: Job) -> None:
    a = any_job.start("a", rules=dataclasses.replace(RULES, max_restarts=1000))
    for number in range(1, 16):
        any_job.until(lambda number=number: a.running == number)  # type: ignore[misc]
        a.fail(charged=False)
    any_job.until(lambda: a.running == 16)
    reader = any_job.connect()
    keys = set(reader.read(Keys(any_job.run_id).prefix, prefix=True).entries)
    reader.close()
    prefix = Keys(any_job.run_id).prefix
    assert keys == {f"{prefix}round", f"{prefix}leader", f"{prefix}nodes/a"}


# What only the store in memory can do.
