"""Real agents on a real etcd, and everything that may happen to a node, to the store or to the job.

Agents are killed with their workers, as a machine that loses its power would. The workers are quick ones without
torch, but for the last test, which trains and proves by its ledger that no sample was lost or used twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.nodes import (
    SLACK,
    START_SECONDS,
    STEPS,
    SUPPORT,
    TTL,
    Nodes,
    furthest,
    furthest_of,
    kill_a_worker,
    no_later_than,
    node_of_rank,
    pids,
)
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.job import wait_for, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def is_charge(key: str) -> bool:
    return key.startswith("charges/")


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """For the jobs that leave it alone."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd") / "data") as cluster:
        yield cluster


@pytest.fixture
def make_nodes(tmp_path: Path, shared_etcd: EtcdCluster) -> Iterator[Callable[..., Nodes]]:
    with contextlib.ExitStack() as stack:

        def make(run_id: str, *settings: str, cluster: EtcdCluster = shared_etcd, **options: Any) -> Nodes:
            nodes = Nodes(tmp_path, cluster, run_id, *settings, **options)
            stack.callback(nodes.close)
            return nodes

        yield make


def test_any_node_may_be_killed_at_any_time_and_others_may_come(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes("killed", "--nnodes", "1:4", "--settle", "3", "--max-restarts", "0", "--last-call", "3")
    nodes.start("a", "b", "c")
    status = nodes.wait_running(3)

    nodes.kill(nodes.leader)
    began = time.monotonic()
    after = nodes.wait_running(2, after=status["round"])
    no_later_than(began, TTL + SLACK)
    assert after["round"] == status["round"] + 1, "one loss costs one round"

    began = time.monotonic()
    nodes.start("d", "e")
    status = nodes.wait_running(4)
    assert status["round"] == after["round"] + 1, f"two newcomers cost one round\n{nodes.output}"
    assert status["incidents"][-1]["lost_steps"] == 0, "a node that comes costs no step"

    doomed = {nodes.leader, node_of_rank(status, 0)}
    doomed |= set() if len(doomed) == 2 else {node_of_rank(status, 1)}
    nodes.kill(*doomed)
    began = time.monotonic()
    status = nodes.wait_running(2, after=status["round"])
    no_later_than(began, TTL + SLACK)
    assert status["restarts"]["used"] == 0, "a lost node is free"

    nodes.start("f")
    wait_for(lambda: nodes.stored().get("nodes/f"), seconds=START_SECONDS)
    nodes.kill("f")  # while it joins: its lease holds, its standby is ready, the others may be about to let it in
    wait_for(lambda: not nodes.stored().get("nodes/f"), seconds=TTL + SLACK)
    status = nodes.wait_running(2)
    nodes.wait_further()


WITH_SWITCH = """
import os, runpy, sys, threading, time
switch = sys.argv[3] + ".78-" + os.environ["ELASTICD_NODE_ID"]
def watch():
    while not os.path.exists(switch):
        time.sleep(0.02)
    os._exit(78)
threading.Thread(target=watch, daemon=True).start()
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def test_one_budget_for_the_job_and_each_start_under_its_id_begins_anew(
    tmp_path: Path, make_nodes: Callable[..., Nodes]
) -> None:
    script = write(tmp_path, "script.py", WITH_SWITCH.format(script=str(SUPPORT / "trainer_script.py")))
    state = tmp_path / "state"
    nodes = make_nodes(
        "again", "--nnodes", "1:2", "--max-restarts", "2", worker=(str(script), str(STEPS), "0.005", str(state))
    )
    a, b = nodes.start("a", "b")
    status = nodes.wait_running(2)
    for used, job in enumerate((b, a), start=1):  # workers fail in turn on different nodes
        nodes.wait_further(steps=furthest(a) + 100)
        began = time.monotonic()
        kill_a_worker(job)
        before, status = status, nodes.wait_running(2, after=status["round"])
        no_later_than(began, SLACK)
        assert status["round"] == before["round"] + 1, "one failure costs one round"
        told = nodes.wait(lambda s, used=used: s["restarts"]["used"] >= used)
        assert {s["restarts"]["used"] for s in told} == {used}, "whichever node it was on"
    kill_a_worker(b)
    assert nodes.ends() == {"a": 1, "b": 1}, nodes.output
    for name in "ab":
        assert "restart budget spent" in nodes.output.partition(f"== {name}\n")[2], nodes.output

    # After a failure, and after everything was killed, while the leases of the dead still hold.
    nodes.start("a", "b")
    anew = nodes.wait_running(2)
    assert anew["incarnation"] != status["incarnation"]
    assert anew["round"] > status["round"]
    assert anew["restarts"]["used"] == 0
    nodes.kill("a", "b")
    nodes.start("a", "b")
    status = nodes.wait_running(2, after=anew["round"])
    assert {node["node_id"] for node in status["nodes"]} == {"a", "b"}, "a ghost does not keep its id"
    Path(f"{state}.78-b").touch()
    assert nodes.ends() == {"a": 78, "b": 78}, nodes.output
    Path(f"{state}.78-b").unlink()

    # To the end, and once more after that.
    for _ in range(2):
        state.write_text(str(STEPS - 5))
        nodes.start("a", "b")
        assert nodes.ends() == {"a": 0, "b": 0}, nodes.output


def test_a_frozen_node_is_left_out_and_comes_back_as_a_newcomer(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes("frozen", "--nnodes", "1:2")
    a, b = nodes.start("a", "b")
    status = nodes.wait_running(2)
    workers = pids(nodes.wait(lambda s: s["workers"], "b"))
    b.signal(signal.SIGSTOP)
    began = time.monotonic()
    a.wait_status(lambda s: s["round"] > status["round"])
    assert not workers & b.processes(), "the workers of a frozen node must be gone before the others go on"
    no_later_than(began, TTL + SLACK)
    alone = nodes.wait_running(1, "a", after=status["round"])
    wait_for(lambda: time.monotonic() - began > 2 * TTL)
    b.signal(signal.SIGCONT)
    both = nodes.wait_running(2, after=alone["round"])
    assert both["round"] == alone["round"] + 1
    assert both["restarts"]["used"] == 0
    assert not workers & b.processes()


def test_every_node_says_which_rank_hung_where_and_counts_from_then(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes("hung", "--nnodes", "2:2", "--hang-timeout", "2")
    nodes.start("a", "b")
    nodes.wait_running(2)
    nodes.wait_further()
    (worker,) = nodes.wait(lambda s: s["workers"], "b")[0]["workers"]
    os.kill(worker["pid"], signal.SIGSTOP)
    told = nodes.wait(lambda s: s["incidents"] and s["incidents"][0]["seconds"]["total"])
    (of_a,), (of_b,) = (status["incidents"] for status in told)
    assert of_a["cause"] == of_b["cause"]
    assert of_a["cause"].startswith(f"rank {worker['rank']} on b hung: "), of_a
    assert of_b["seconds"]["detect"] >= 2
    assert abs(of_a["seconds"]["detect"] - of_b["seconds"]["detect"]) < 0.5, (of_a, of_b)
    log = nodes.output.partition("== b\n")[0]
    assert re.search(rf" WARNING \S+ round 1 is over: rank {worker['rank']} on b hung", log), log


def test_a_newcomer_warms_its_standby_before_it_is_let_in(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes("warm", "--nnodes", "1:2", "--last-call", "0.5")
    nodes.start("a")
    nodes.wait_running(1)
    (b,) = nodes.start("b", PET_STANDBY="1")
    nodes.wait(lambda s: [w["reason"] for w in s["waiting"]] == ["it is getting ready"], "b")
    nodes.wait_running(2)
    warm, started = b.output.find(" is warm"), b.output.find("starting ranks")
    assert 0 < warm < started, b.output
    (pid,) = pids(nodes.wait(lambda s: s["workers"], "b"))
    assert f"(pid {pid}) is warm" in b.output


def test_what_needs_no_lease_to_end_does_not_wait_for_one(make_nodes: Callable[..., Nodes]) -> None:
    ttl = 60  # longer than an agent takes to start, whatever else runs
    nodes = make_nodes("prompt", "--nnodes", "1:2", "--lease-ttl", str(ttl))
    nodes.start("a", "b")
    status = nodes.wait_running(2)

    nodes.kill("b")
    began = time.monotonic()
    nodes.start("b")  # it takes its own id over from its ghost
    status = nodes.wait_running(2, after=status["round"], seconds=ttl)
    no_later_than(began, ttl)
    assert {node["node_id"] for node in status["nodes"]} == {"a", "b"}

    workers = pids(nodes.wait(lambda s: s["workers"]))
    began = time.monotonic()
    kill_a_worker(nodes.jobs["b"])
    nodes.jobs["a"].wait_status(lambda s: not workers & pids([s]))
    no_later_than(began, SLACK)
    status = nodes.wait_running(2, after=status["round"])

    leaving = nodes.leader
    (staying,) = {"a", "b"} - {leaving}
    nodes.jobs[leaving].signal(signal.SIGTERM)
    began = time.monotonic()
    status = nodes.wait_running(1, staying, after=status["round"])
    no_later_than(began, SLACK)
    assert status["incidents"][-1]["lost_steps"] == 0, "a node that leaves costs no step"
    assert nodes.jobs.pop(leaving).wait() == 143
    nodes.jobs[staying].signal(signal.SIGTERM)
    assert nodes.ends() == {staying: 143}
    assert [key for key in nodes.stored() if not is_charge(key)] == ["round"], "who leaves takes its keys along"


def test_the_store_may_lose_a_member_start_again_or_freeze_and_is_missed_when_it_is_gone(
    tmp_path: Path, make_nodes: Callable[..., Nodes]
) -> None:
    patience = 8
    with etcd_cluster(tmp_path / "etcd", 3) as cluster:
        nodes = make_nodes(
            "store", "--nnodes", "1:2", "--join-timeout", str(patience), "--last-call", "5", cluster=cluster
        )
        nodes.start("a", "b")
        status = nodes.wait_running(2)

        for index in range(3):  # one after another: whoever leads them and whoever the agents talk to
            cluster.members[index].kill()
            nodes.wait_further(steps=int(TTL / 0.02))
            cluster.restart(index)
        assert nodes.wait_running(2)["round"] == status["round"], f"no round for one member of three\n{nodes.output}"

        for member in cluster.members:
            member.kill()
        cluster.restart(0, 1, 2)
        nodes.wait_further(steps=int(TTL / 0.02))
        status = nodes.wait_running(2)

        workers = pids(nodes.wait(lambda s: s["workers"]))
        began = time.monotonic()
        for member in cluster.members:
            member.freeze()
        wait_for(lambda: not any(workers & job.processes() for job in nodes.jobs.values()), seconds=TTL)
        stopped_at = int(nodes.state_file.read_text())
        wait_for(lambda: time.monotonic() - began > 2 * TTL)
        for member in cluster.members:
            member.thaw()
        status = nodes.wait_running(2, after=status["round"], seconds=patience + 10)
        assert status["base_step"] == stopped_at, f"they had drained in time\n{nodes.output}"
        for job in nodes.jobs.values():
            told = job.wait_status(lambda s: s["incidents"] and s["incidents"][-1]["seconds"]["total"] is not None)
            incident = told["incidents"][-1]
            assert incident["cause"] == "etcd has not answered for most of the lease", job.output
            assert incident["lost_steps"] == 0
        assert status["restarts"]["used"] == 0

        for member in cluster.members:
            member.kill()
        began = time.monotonic()
        assert nodes.ends() == {"a": 4, "b": 4}, nodes.output
        assert patience <= time.monotonic() - began + TTL
        no_later_than(began, patience + 2 * TTL + 2 * SLACK)
        assert "etcd has not answered" in nodes.output


def test_too_few_nodes_wait_visibly_beside_another_job_on_the_same_store(make_nodes: Callable[..., Nodes]) -> None:
    short = make_nodes("short", "--nnodes", "2:2", "--join-timeout", "4", "--last-call", "1")
    other = make_nodes("short2", "--nnodes", "1:1")
    (lonely,) = short.start("a")
    other.start("a")
    status = lonely.wait_status(lambda s: s["state"] == "waiting" and s["waiting"], seconds=START_SECONDS)
    assert "1 of 2 nodes" in status["waiting"][0]["reason"]
    assert short.ends() == {"a": 3}
    assert "1 of 2 nodes" in short.output
    other.wait_running(1)
    assert other.wait(lambda s: s["nodes"])[0]["nodes"][0]["node_id"] == "a", "the id is free in another job"


def test_who_is_over_max_is_a_spare_until_a_seat_is_free_and_ends_with_the_job(
    make_nodes: Callable[..., Nodes],
) -> None:
    nodes = make_nodes("spare", "--nnodes", "1:2")
    nodes.start("a", "b")
    status = nodes.wait_running(2)
    nodes.start("c")
    (again,) = nodes.start("again", node_id="b", PET_LOG_FORMAT="json")  # the node of this id still runs
    nodes.wait(lambda s: s["state"] == "spare", "c", "again")
    assert nodes.wait(lambda s: True, "again")[0]["node_id"] == "b-2"
    assert nodes.wait_running(2, "a", "b")["round"] == status["round"], "a spare disturbs nobody"

    nodes.kill("a")
    began = time.monotonic()
    status = nodes.wait_running(2, "b", after=status["round"])
    no_later_than(began, TTL + SLACK)
    assert {node["node_id"] for node in status["nodes"]} in ({"b", "c"}, {"b", "b-2"})

    nodes.state_file.write_text(str(STEPS - 5))
    kill_a_worker(nodes.jobs["b"])
    assert nodes.ends() == {"b": 0, "c": 0, "again": 0}, nodes.output
    told = [json.loads(line)["node_id"] for line in again.output.splitlines() if line.startswith("{")]
    assert told[-1] == "b-2", again.output


def test_a_wrong_password_is_refused_at_once(tmp_path: Path, make_nodes: Callable[..., Nodes]) -> None:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        cluster.enable_auth(("trainer", "right", "/elasticd/locked/"))
        nodes = make_nodes("locked", "--nnodes", "1:1", "--etcd-user", "trainer", cluster=cluster)
        nodes.start("a", ELASTICD_ETCD_PASSWORD="wrong-one")
        began = time.monotonic()
        assert nodes.ends() == {"a": 2}, nodes.output
        no_later_than(began, 20)
        assert "ELASTICD_ETCD_PASSWORD" in nodes.output
        assert "wrong-one" not in nodes.output


def test_nothing_in_the_key_space_grows_with_the_rounds(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(
        "growth", "--nnodes", "2:2", "--max-restarts", "100", "--restart-window", str(TTL), "--settle", "0"
    )
    jobs = nodes.start("a", "b")
    sizes = []
    for turn in range(15):
        status = nodes.wait_running(2, after=turn)
        sizes.append({key: len(value) for key, value in nodes.stored().items() if not is_charge(key)})
        nodes.state_file.write_text(str(10 * turn))  # progress: a failure after it is answered without a back-off
        jobs[turn % 2].wait_status(lambda s, turn=turn: furthest_of(s) > 10 * turn + 3)
        kill_a_worker(jobs[turn % 2])
    assert status["round"] == 15
    assert sizes[1].keys() == sizes[-1].keys() == {"round", "leader", "nodes/a", "nodes/b"}
    assert sum(sizes[-1].values()) < 1.2 * sum(sizes[1].values()), sizes
    nodes.wait_running(2, after=15)
    wait_for(lambda: not [*filter(is_charge, nodes.stored())], seconds=3 * TTL)


def test_real_training_loses_and_repeats_no_sample_when_nodes_are_killed_added_and_drained(
    tmp_path: Path, make_nodes: Callable[..., Nodes]
) -> None:
    from elastic.demo.ledger import audit, planned_steps, read_ledger

    steps = 200
    settings = ("--nnodes", "1:3", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "4")
    worker = (str(SUPPORT / "training_script.py"), str(tmp_path))
    nodes = make_nodes("real", *settings, worker=worker)
    environ = {"TEST_STEPS": str(steps), "TEST_STEP_SECONDS": "0.005"}
    slow = write(tmp_path, "slow", "")
    nodes.start("a", "b", "c", **environ)
    status = nodes.wait_running(3)
    nodes.jobs["a"].wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 4)
    nodes.kill("b")
    status = nodes.wait_running(2, after=status["round"])
    nodes.start("d", **environ)
    status = nodes.wait_running(3, after=status["round"])
    assert status["incidents"][-1]["lost_steps"] == 0, f"a node that comes costs no step\n{nodes.output}"
    nodes.jobs["a"].signal(signal.SIGTERM)
    status = nodes.wait_running(2, "c", "d", after=status["round"])
    assert status["incidents"][-1]["lost_steps"] == 0, f"a node that leaves costs no step\n{nodes.output}"
    slow.unlink()
    assert nodes.ends() == {"a": 143, "c": 0, "d": 0}, nodes.output
    plan = planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=steps)
    found = audit(read_ledger((tmp_path / "ledger").read_text()).entries, plan)
    assert found.is_right, found
    assert (tmp_path / "digest").exists()
