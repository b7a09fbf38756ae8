"""What else may happen to a node of a job on etcd: wrong clocks, deaths at bad moments, pauses, a store that refuses.

The workers are quick ones without torch. They write down that they live, so that a test can tell, by one clock, whether
those of an old round were gone before a new one began.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.rendezvous.records import NodeRecord
from elastic.rendezvous.round import Round
from tests.e2e.nodes import (
    SLACK,
    START_SECONDS,
    STEPS,
    SUPPORT,
    TTL,
    Nodes,
    kill_a_worker,
    no_later_than,
    pids,
)
from tests.support.beating_script import assert_rounds_never_overlap, read_lives
from tests.support.etcd import Certificates, EtcdCluster, etcd_cluster
from tests.support.job import Job, marked, wait_for, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
HOUR = 3600

Make = Callable[..., Nodes]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd") / "data") as cluster:
        yield cluster


@pytest.fixture
def make(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Make]:
    """Agents whose workers write down that they live."""
    with contextlib.ExitStack() as stack:

        def nodes_of(run_id: str, *settings: str) -> Nodes:
            state = tmp_path / run_id / "state"
            worker = (str(SUPPORT / "beating_script.py"), str(STEPS), "0.02", str(state))
            nodes = Nodes(tmp_path, etcd, run_id, *settings, worker=worker)
            stack.callback(nodes.close)
            return nodes

        yield nodes_of


def pause(job: Job) -> set[int]:
    """Everything of a node stands still, its warden as well, as when its machine is paused. Returns who to wake."""
    everything = node_processes(job)
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return everything


def node_processes(job: Job) -> set[int]:
    return marked(job.mark)


def wake(everything: set[int]) -> None:
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stored_round(nodes: Nodes) -> Round:
    return Round.from_json(nodes.stored()["round"])


# grpc hands a deadline by this clock on to C, whose clock cannot be shifted from here: it is to see one clock as well.
WRONG_CLOCK = """
import datetime, os, sys, time
shift = float(os.environ["TEST_CLOCK_SHIFT"])
true_time, true_time_ns, true = time.time, time.time_ns, datetime.datetime
def wrong_time():
    of_grpc = sys._getframe(1).f_globals.get("__name__", "").startswith("grpc.")
    return true_time() + (0 if of_grpc else shift)
time.time = wrong_time
time.time_ns = lambda: true_time_ns() + int(shift * 1e9)
class Wrong(true):
    @classmethod
    def now(cls, tz=None):
        return true.now(tz) + datetime.timedelta(seconds=shift)
    @classmethod
    def utcnow(cls):
        return true.utcnow() + datetime.timedelta(seconds=shift)
datetime.datetime = Wrong
"""


def test_clocks_that_are_hours_apart_and_a_store_that_forgets_its_history_change_nothing(
    tmp_path: Path, make: Make, etcd: EtcdCluster
) -> None:
    write(tmp_path, "sitecustomize.py", WRONG_CLOCK)
    nodes = make("clocks", "--nnodes", "1:2", "--max-restarts", "1")
    nodes.start("a", PYTHONPATH=str(tmp_path), TEST_CLOCK_SHIFT=str(HOUR))
    nodes.start("b", PYTHONPATH=str(tmp_path), TEST_CLOCK_SHIFT=str(-HOUR))
    status = nodes.wait_running(2)
    nodes.wait_further(steps=int(2 * TTL / 0.02))
    assert nodes.wait_running(2)["round"] == status["round"]

    etcd.compact()  # the agents' watches began below this
    etcd.ask("/v3/maintenance/defragment", {})
    for name in "ab":
        began = time.monotonic()
        if name == "a":
            kill_a_worker(nodes.jobs[name])
        else:
            nodes.kill(name)
        status = nodes.wait_running(2 if name == "a" else 1, "a", after=status["round"])
        no_later_than(began, TTL + SLACK)
    nodes.start("b", PYTHONPATH=str(tmp_path), TEST_CLOCK_SHIFT=str(-HOUR))
    status = nodes.wait_running(2, after=status["round"])
    assert status["restarts"]["used"] == 1, "the window of the budget is the store's"
    wrong = [incident["time"] - time.time() for incident in status["incidents"]]
    assert wrong, status
    assert all(HOUR / 2 < shift < 2 * HOUR for shift in wrong), "the clock was not wrong at all"
    assert all(0 <= (incident["seconds"]["total"] or 0) < START_SECONDS for incident in status["incidents"])
    assert_rounds_never_overlap(nodes.state_file)


def test_a_node_dies_between_the_decision_that_seats_it_and_its_start(make: Make) -> None:
    ttl = 4
    nodes = make("between", "--nnodes", "1:2", "--lease-ttl", str(ttl))
    nodes.start("a", "b")
    status = nodes.wait_running(2)
    leader = nodes.leader
    (victim,) = {"a", "b"} - {leader}

    nodes.jobs[leader].signal(signal.SIGSTOP)  # nothing is decided meanwhile
    kill_a_worker(nodes.jobs[victim])
    node = f"nodes/{victim}"
    wait_for(lambda: NodeRecord.from_json(nodes.stored()[node]).node.after == status["round"], seconds=ttl / 2)
    nodes.jobs[victim].signal(signal.SIGSTOP)  # it has said that its workers are gone, and waits for the next round
    nodes.jobs[leader].signal(signal.SIGCONT)
    wait_for(lambda: stored_round(nodes).number == status["round"] + 1, seconds=ttl / 2)
    assert stored_round(nodes).node_rank(victim) is not None
    nodes.kill(victim)
    began = time.monotonic()

    alone = nodes.wait_running(1, leader, after=status["round"] + 1)
    no_later_than(began, ttl + SLACK)
    assert alone["restarts"]["used"] == 1, "the worker that failed before, not the node that was lost"
    nodes.start(victim)
    nodes.wait_running(2, after=alone["round"])
    lived = {(life.node, life.round) for life in read_lives(nodes.state_file)}
    assert (leader, status["round"] + 1) in lived
    assert (victim, status["round"] + 1) not in lived, "it was to die before its start"
    assert_rounds_never_overlap(nodes.state_file)


def test_who_comes_and_dies_again_and_again_is_let_in_later_and_costs_nothing_else(make: Make) -> None:
    nodes = make("flapping", "--nnodes", "1:2", "--max-restarts", "0", "--last-call", "0.1")
    (a,) = nodes.start("a")
    nodes.wait_running(1)
    nodes.start("b")
    status = nodes.wait_running(2)
    nodes.kill("b")
    nodes.wait_running(1, "a", after=status["round"])

    nodes.start("b")
    status = a.wait_status(lambda s: any("back-off" in w["reason"] for w in s["waiting"]), seconds=START_SECONDS)
    began = time.monotonic()
    begun_in = status["round"]
    a.wait_status(lambda s: time.monotonic() - began > 4 or s["round"] > begun_in)
    assert a.wait_status(lambda s: True)["round"] == begun_in, f"it is let in 5 s after it came\n{nodes.output}"
    status = nodes.wait_running(2, after=begun_in)
    no_later_than(began, 5 + SLACK)
    assert status["round"] == begun_in + 1
    assert status["restarts"]["used"] == 0
    assert_rounds_never_overlap(nodes.state_file)


def test_a_frozen_agents_workers_and_a_paused_nodes_are_gone_and_both_come_back_as_newcomers(make: Make) -> None:
    nodes = make("paused", "--nnodes", "1:2", "--max-restarts", "0")
    nodes.start("a", "b")
    status = nodes.wait_running(2)
    nodes.jobs["b"].signal(signal.SIGSTOP)
    began = time.monotonic()
    alone = nodes.wait_running(1, "a", after=status["round"])
    no_later_than(began, TTL + SLACK)
    wait_for(lambda: time.monotonic() > began + 2 * TTL, seconds=3 * TTL)
    nodes.jobs["b"].signal(signal.SIGCONT)
    status = nodes.wait_running(2, after=alone["round"])
    assert_rounds_never_overlap(nodes.state_file)

    old = pids(nodes.wait(lambda s: s["workers"], "a"))
    everything = pause(nodes.jobs["a"])  # it was there first, and is the leader if nothing went wrong
    began = time.monotonic()
    alone = nodes.wait_running(1, "b", after=status["round"])
    no_later_than(began, TTL + SLACK)
    wait_for(lambda: time.monotonic() > began + 2 * TTL, seconds=3 * TTL)
    wake(everything)
    woken = time.monotonic()
    wait_for(lambda: not old & node_processes(nodes.jobs["a"]), seconds=SLACK)
    (life,) = [life for life in read_lives(nodes.state_file) if (life.node, life.round) == ("a", status["round"])]
    assert life.last < woken + 1, "the warden ends at once what has outlived its lease"
    status = nodes.wait_running(2, after=alone["round"])
    assert status["round"] == alone["round"] + 1
    assert status["restarts"]["used"] == 0


@pytest.mark.usefixtures("etcd")
def test_what_is_wrong_with_the_way_to_the_store_is_said_in_seconds(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    with (
        etcd_cluster(tmp_path / "tls", certificates=ours) as tls,
        etcd_cluster(tmp_path / "auth") as auth,
        contextlib.ExitStack() as stack,
    ):
        auth.enable_auth(("trainer", "right", "/elasticd/job/"))
        safe, locked = (f"127.0.0.1:{cluster.members[0].port}" for cluster in (tls, auth))
        nowhere = "no-such-host.invalid"
        cases = {
            "authority": ((safe, "--etcd-ca", str(theirs.ca)), (safe, "--etcd-ca")),
            "password": ((locked, "--etcd-user", "trainer"), (locked, "'trainer'", "ELASTICD_ETCD_PASSWORD")),
            "host": ((f"{nowhere}:2379",), (nowhere, "--rdzv-endpoint")),
            "address": ((locked, "--local-addr", nowhere), (nowhere, "--local-addr")),
            "interface": ((locked, "--local-addr", "192.0.2.1"), ("192.0.2.1", "--local-addr")),
        }
        jobs: dict[str, Job] = {}
        for name, ((endpoint, *settings), _) in cases.items():
            folder = tmp_path / name
            folder.mkdir()
            etcd3 = ("--rdzv-backend", "etcd3", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--nnodes", "1:2")
            script = write(folder, "script.py", "raise SystemExit(9)")
            environ = {"ELASTICD_ETCD_PASSWORD": "wrong-one"}
            jobs[name] = Job(folder, "--http", "127.0.0.1:0", *etcd3, *settings, str(script), environ=environ)
            stack.callback(jobs[name].close)
        began = time.monotonic()
        for name, (_, words) in cases.items():
            assert jobs[name].wait() == 2, f"{name}: {jobs[name].output}"
            last = jobs[name].output.strip().splitlines()[-1]
            for word in words:
                assert word in last, f"{name}: {jobs[name].output}"
            assert "wrong-one" not in jobs[name].output
        no_later_than(began, 30)
