"""Real training on many nodes, hit while it saves: the end is always that of a run that nobody disturbs.

Jobs of 2:2 nodes have a world of one size whatever happens, so that their end is equal to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.demo.ledger import Ledger, audit, planned_steps, read_ledger
from tests.e2e.nodes import START_SECONDS, SUPPORT, TTL, Nodes, node_of_rank
from tests.support.etcd import EtcdCluster, etcd_cluster
from tests.support.job import run_to_end, wait_for, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = str(SUPPORT / "training_script.py")
STEPS = 60
SAVING = ("--checkpoint-dir", "checkpoints", "--checkpoint-every", "4")

Make = Callable[..., Nodes]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd") / "data") as cluster:
        yield cluster


@pytest.fixture
def make(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def nodes_of(run_id: str, *settings: str) -> Nodes:
            nodes = Nodes(tmp_path, etcd, run_id, "--no-standby", *settings, worker=(SCRIPT, str(tmp_path)))
            stack.callback(nodes.close)
            return nodes

        yield nodes_of


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = ("--http", "127.0.0.1:0", "--no-standby", "--nproc-per-node", "2", *SAVING)
    code, output = run_to_end(folder, *settings, SCRIPT, str(folder), environ=environ(0), seconds=START_SECONDS)
    assert code == 0, output
    all_samples_used_once(folder)
    return (folder / "digest").read_text()


def environ(save_seconds: float) -> dict[str, str]:
    return {"TEST_STEPS": str(STEPS), "TEST_SAVE_SECONDS": str(save_seconds)}


def all_samples_used_once(folder: Path) -> Ledger:
    """By what counts of each step; what was thrown away with a lost round does not."""
    ledger = read_ledger((folder / "ledger").read_text())
    found = audit(ledger.entries, planned_steps(samples=67, global_batch=8, micro_batch=2, seed=5, steps=STEPS))
    assert found.is_right, found
    return ledger


def is_saving(checkpoints: Path) -> bool:
    return any(checkpoints.glob(".writing-*"))


def wait_for_a_save(checkpoints: Path) -> None:
    """Until one has just begun."""
    wait_for(lambda: not is_saving(checkpoints), seconds=START_SECONDS)
    wait_for(lambda: is_saving(checkpoints), seconds=START_SECONDS)


def committed_step(checkpoints: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))


def test_a_node_is_killed_and_one_is_paused_in_the_midst_of_a_commit(
    tmp_path: Path, make: Make, undisturbed: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    slow = write(tmp_path, "slow", "")
    nodes = make("commits", "--nnodes", "2:2", "--checkpoint-dir", str(checkpoints), "--checkpoint-every", "4")
    saving = environ(0.6)
    nodes.start("a", "b", **saving)
    status = nodes.wait_running(2)
    wait_for(lambda: any(checkpoints.glob("step-*")), seconds=START_SECONDS)

    wait_for_a_save(checkpoints)
    nodes.kill("b")
    assert is_saving(checkpoints)
    nodes.start("b", **saving)
    status = nodes.wait_running(2, after=status["round"])

    paused = node_of_rank(status, 0)  # whose worker publishes
    (other,) = {"a", "b"} - {paused}
    wait_for_a_save(checkpoints)
    everything = nodes.jobs[paused].processes()
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    assert is_saving(checkpoints), "it was to be paused before it could publish"
    nodes.wait(lambda s: s["state"] == "waiting", other)
    nodes.start("c", **saving)
    status = nodes.wait_running(2, other, "c", after=status["round"])
    nodes.wait_further(other, "c", steps=4)
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    nodes.wait(lambda s: s["state"] == "spare", paused)  # there are two without it
    nodes.wait_further(other, "c", steps=4)
    slow.unlink()
    assert nodes.ends() == {"a": 0, "b": 0, "c": 0}, nodes.output
    all_samples_used_once(tmp_path)
    assert (tmp_path / "digest").read_text() == undisturbed
    assert not list(checkpoints.glob(".writing-*")), "what a dead round has left is cleared away"


def waits_for_another(status: dict[str, Any]) -> bool:
    """One of two nodes is there; until their leases have ended it waits for the workers of those that are gone."""
    reasons = " ".join(waiting["reason"] for waiting in status["waiting"])
    return status["state"] == "waiting" and "1 of 2 nodes" in reasons


def test_term_to_one_and_to_all_while_a_save_takes_longer_than_the_lease(
    tmp_path: Path, make: Make, undisturbed: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    write(tmp_path, "slow", "")
    nodes = make("term", "--nnodes", "2:2", "--checkpoint-dir", str(checkpoints), "--checkpoint-every", "4")
    saving = environ(1.5 * TTL)

    def term_one() -> None:
        nodes.jobs["b"].signal(signal.SIGTERM)
        assert nodes.jobs.pop("b").wait(START_SECONDS) == 143, nodes.output
        nodes.wait(waits_for_another, "a")

    def term_all() -> None:
        nodes.jobs["a"].signal(signal.SIGTERM)
        os.killpg(nodes.jobs["b"].process.pid, signal.SIGTERM)  # as a terminal or a shell would: the whole group
        assert nodes.ends() == {"a": 143, "b": 143}, nodes.output

    last = 0
    for term in (term_one, term_all):
        nodes.start(*({"a", "b"} - nodes.jobs.keys()), **saving)
        status = nodes.wait_running(2, after=last)
        wait_for_a_save(checkpoints)
        term()
        last = status["round"]
        applied = read_ledger((tmp_path / "ledger").read_text()).last_step
        assert committed_step(checkpoints) == applied, f"who is asked to stop saves what it has done\n{nodes.output}"
    (tmp_path / "slow").unlink()
    nodes.start("a", "b", **environ(0))
    assert nodes.ends() == {"a": 0, "b": 0}, nodes.output
    ledger = all_samples_used_once(tmp_path)
    done = [(entry.step, entry.rank) for entry in ledger.entries]
    assert len(done) == len(set(done)), "no rank has done a step twice: all had stopped at one boundary"
    assert (tmp_path / "digest").read_text() == undisturbed


def test_two_of_three_go_and_who_comes_with_an_empty_disk_gets_the_state_of_the_one_that_waited(
    tmp_path: Path, make: Make
) -> None:
    slow = write(tmp_path, "slow", "")
    nodes = make("disks", "--nnodes", "2:3", "--last-call", "60", *SAVING)  # relative: a directory for each node
    nodes.start("a", "b", "c", **environ(0))
    status = nodes.wait_running(3)
    nodes.jobs["a"].wait_status(lambda s: (s["checkpoint"]["disk_step"] or 0) >= 4, seconds=START_SECONDS)
    nodes.kill("b", "c")
    nodes.wait(waits_for_another, "a", seconds=TTL + 20)
    nodes.start("d", **environ(0))
    status = nodes.wait_running(2, after=status["round"])
    assert status["base_step"] >= 4
    assert status["base_step"] == nodes.jobs["d"].wait_status(lambda s: True)["base_step"]
    slow.unlink()
    assert nodes.ends() == {"a": 0, "d": 0}, nodes.output
    all_samples_used_once(tmp_path)
    for name in "ad":
        assert committed_step(nodes.folder / name / "checkpoints") == STEPS


def test_who_is_stopped_while_it_waits_for_others_saves_what_its_memory_holds(
    tmp_path: Path, make: Make, undisturbed: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    slow = write(tmp_path, "slow", "")
    settings = ("--checkpoint-dir", str(checkpoints), "--checkpoint-every", "1000", "--memory-every", "1")
    nodes = make("below", "--nnodes", "2:2", *settings)
    nodes.start("a", "b", **environ(0))
    nodes.jobs["a"].wait_status(lambda s: (s["checkpoint"]["memory_step"] or 0) >= 3, seconds=START_SECONDS)
    nodes.kill("b")
    (status,) = nodes.wait(waits_for_another, "a", seconds=TTL + 20)
    assert "node b lost" in " ".join(waiting["reason"] for waiting in status["waiting"])
    nodes.jobs["a"].signal(signal.SIGTERM)
    code = nodes.jobs.pop("a").wait(START_SECONDS)
    applied, saved = read_ledger((tmp_path / "ledger").read_text()).last_step, committed_step(checkpoints)
    assert applied - 1 <= saved <= applied
    assert code == (143 if saved == applied else 5), nodes.output
    slow.unlink()
    nodes.start("a", "b", **environ(0))
    assert nodes.ends() == {"a": 0, "b": 0}, nodes.output
    last_round = [entry for entry in all_samples_used_once(tmp_path).entries if not entry.closed_by][-1].round
    assert (
        min(e.step for e in read_ledger((tmp_path / "ledger").read_text()).entries if e.round == last_round)
        == saved + 1
    )
    assert (tmp_path / "digest").read_text() == undisturbed
