"""The agents of a job on one etcd, as the tests of many nodes start, hit and watch them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.etcd import EtcdCluster
from tests.support.job import Job, wait_for

SUPPORT = Path(__file__).parents[1] / "support"
TTL = 2
SLACK = 5.0  # for what the machine itself needs, beside what the settings say
START_SECONDS = 120.0  # a deadline, for agents that start while much else runs
STEPS = 100_000
Status = dict[str, Any]


class Nodes:
    """The agents of one job, each in a folder of its own, as if on a machine of its own."""

    def __init__(self, folder: Path, cluster: EtcdCluster, run_id: str, *settings: str, worker: tuple[str, ...] = ()):
        self.folder = folder / run_id
        self.folder.mkdir()
        self.cluster = cluster
        self.run_id = run_id
        self.state_file = self.folder / "state"
        self.settings = ("--lease-ttl", str(TTL), "--settle", "0.5", "--last-call", "30", *settings)
        self.worker = worker or (str(SUPPORT / "trainer_script.py"), str(STEPS), "0.02", str(self.state_file))
        self.jobs: dict[str, Job] = {}
        self._closing = contextlib.ExitStack()

    def start(self, *names: str, node_id: str = "", **environ: str) -> list[Job]:
        """A fresh agent for each name, which is its id as well; what an earlier one has left in the folder stays."""
        endpoints = ",".join(f"{host}:{port}" for host, port in self.cluster.endpoints)
        etcd = ("--rdzv-backend", "etcd3", "--rdzv-endpoint", endpoints, "--rdzv-id", self.run_id)
        for name in names:
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            own = ("--http", "127.0.0.1:0", "--node-id", node_id or name)
            self.jobs[name] = Job(folder, *own, *etcd, *self.settings, *self.worker, environ=environ)
            self._closing.callback(self.jobs[name].close)
        return [self.jobs[name] for name in names]

    def kill(self, *names: str) -> None:
        """All at once, agent and workers: neither says goodbye."""
        doomed = [self.jobs.pop(name) for name in names]
        for job in doomed:
            os.killpg(job.process.pid, signal.SIGKILL)
        for pid in set().union(*(job.processes() for job in doomed)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in doomed:
            job.process.wait(10)

    def wait(self, condition: Callable[[Status], object], *names: str, seconds: float = START_SECONDS) -> list[Status]:
        """The status of each agent once the condition holds for it; of all agents without names."""
        deadline = time.monotonic() + seconds
        try:
            return [
                self.jobs[name].wait_status(condition, seconds=deadline - time.monotonic())
                for name in (names or self.jobs)
            ]
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.output}") from exc

    def wait_running(self, world: int, *names: str, after: int = 0, seconds: float = START_SECONDS) -> Status:
        """Until each trains in a round of that size, later than `after`, and it is the same one. The first's status."""
        found = self.wait(lambda s: is_training(s, world, after), *names, seconds=seconds)
        assert len({status["round"] for status in found}) == 1, f"{found}\n{self.output}"
        return found[0]

    def wait_further(self, *names: str, steps: int = 20) -> None:
        """Until each has trained on, in whatever round it is."""
        begun = {name: furthest(self.jobs[name]) for name in (names or self.jobs)}
        for name, step in begun.items():
            self.wait(lambda s, step=step: furthest_of(s) > step + steps, name)

    def ends(self, seconds: float = START_SECONDS) -> dict[str, int]:
        """How every agent has ended; they are gone from here then."""
        deadline = time.monotonic() + seconds
        try:
            codes = {name: job.wait(max(0.1, deadline - time.monotonic())) for name, job in self.jobs.items()}
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.output}") from exc
        self.jobs = {}
        return codes

    @property
    def output(self) -> str:
        logs = sorted(self.folder.glob("*/agent-*.log"))
        return "\n".join(f"== {log.parent.name}\n{log.read_text(errors='replace')}" for log in logs)

    def stored(self) -> dict[str, str]:
        """The job's key space, without the prefix."""
        prefix = f"/elasticd/{self.run_id}/"
        asked = {"key": encode(prefix), "range_end": encode(prefix[:-1] + chr(ord("/") + 1))}
        pairs = self.cluster.ask("/v3/kv/range", asked).get("kvs", ())
        return {decode(pair["key"]).removeprefix(prefix): decode(pair["value"]) for pair in pairs}

    @property
    def leader(self) -> str:
        return str(json.loads(wait_for(lambda: self.stored().get("leader")))["node_id"])

    def close(self) -> None:
        self._closing.close()


def is_training(status: Status, world: int, after: int = 0) -> bool:
    if status["state"] != "running" or status["world_size"] != world or status["round"] <= after:
        return False
    return bool(status["workers"]) and all((worker["step"] or 0) > 0 for worker in status["workers"])


def furthest_of(status: Status) -> int:
    return max((worker["step"] or 0 for worker in status["workers"]), default=-1)


def furthest(job: Job) -> int:
    return furthest_of(job.wait_status(lambda s: s["workers"]))


def node_of_rank(status: Status, rank: int) -> str:
    return next(str(node["node_id"]) for node in status["nodes"] if node["node_rank"] == rank)


def pids(statuses: Iterable[Status]) -> set[int]:
    return {worker["pid"] for status in statuses for worker in status["workers"]}


def kill_a_worker(job: Job) -> None:
    (worker,) = pids([job.wait_status(lambda s: s["workers"])])
    os.kill(worker, signal.SIGKILL)


def no_later_than(began: float, seconds: float) -> None:
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.1f} s instead of {seconds:.1f}"


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def decode(text: str) -> str:
    return base64.b64decode(text).decode()
