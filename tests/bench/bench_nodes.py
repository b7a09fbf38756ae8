"""Seconds that a node costs the others which is lost, comes or leaves: `elasticd run` on etcd, `torchrun` over c10d.

Side by side in one run, the same plain script, three nodes of one rank on this host. A node is lost when its agent and
all below it are killed at once. Counted are: from the kill to the next new step of the others; from the start of a new
agent to the first step of the larger world, and the pause of the others for it; their pause for one that gets SIGTERM.

    python -m tests.bench.bench_nodes [--turns N] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.etcd import etcd_cluster, free_ports
from tests.support.job import wait_for

SCRIPT = str(Path(__file__).with_name("recovery_script.py"))
MEGABYTES = "1"
NODES = 3
TTL_SECONDS = 2
SETTLED_STEPS = 50
START_SECONDS = 180.0
GOALS = {"lost: next step": TTL_SECONDS + 1.5, "left: pause": 2.0}  # seconds

Command = Callable[[str], list[str]]  # of a node's name: its launcher


class Step(NamedTuple):
    """That a rank has applied, in a world of that size."""

    number: int
    rank: int
    at: float  # CLOCK_MONOTONIC
    world: int


class Cluster:
    """The nodes of one job; the script's folder is shared."""

    def __init__(self, folder: Path, command: Command, limit_seconds: float) -> None:
        self.folder = folder
        self._command = command
        self._limit_seconds = limit_seconds
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()

    def start(self, name: str) -> None:
        runtime = self.folder / f"run-{name}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RUNTIME_DIRECTORY": str(runtime)}
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see bench_recovery: torchrun is timed at its best
        with (self.folder / f"log-{name}").open("ab") as log:
            self._agents[name] = subprocess.Popen(
                [sys.executable, "-m", *self._command(name), SCRIPT, str(self.folder), MEGABYTES],
                env=environ,
                stdout=log,
                stderr=log,
            )

    def lose(self, name: str) -> None:
        agent = self._agents.pop(name)
        for pid in [agent.pid, *below(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(20)

    def leave(self, name: str) -> subprocess.Popen[bytes]:
        agent = self._agents.pop(name)
        agent.send_signal(signal.SIGTERM)
        return agent

    def close(self) -> None:
        for name in list(self._agents):
            self.lose(name)

    def settle(self, world: int) -> None:
        """Until a world of that size has trained for a while, and each of our agents has its standby again."""
        begun = self.newest(world)
        wait_for(
            lambda: self.newest(world) >= begun + SETTLED_STEPS, seconds=START_SECONDS, what=f"{world} nodes train"
        )
        logs = [self.folder / f"log-{name}" for name in self._agents]
        wait_for(
            lambda: all(b" elastic." not in (text := log.read_bytes()) or is_warm(text) for log in logs),
            seconds=START_SECONDS,
            what="standbys",
        )

    def first(self, world: int, since: float) -> float | None:
        """When all of a world of that size had applied a step after that moment; None: not within the limit."""

        def found() -> float | None:
            times: dict[int, dict[int, float]] = {}
            for step in self.steps():
                if step.world == world and step.at > since:
                    times.setdefault(step.number, {})[step.rank] = step.at
            return min((max(ranks.values()) for ranks in times.values() if len(ranks) == world), default=None)

        try:
            return wait_for(found, seconds=self._limit_seconds, what=f"a step of {world} nodes")
        except AssertionError:
            return None

    def last(self, world: int, before: float) -> float:
        """When a world of that size had applied a step for the last time before that moment."""
        return max(step.at for step in self.steps() if step.world == world and step.at < before)

    def newest(self, world: int) -> int:
        return max((step.number for step in self.steps() if step.world == world), default=0)

    def steps(self) -> list[Step]:
        path = self.folder / "times"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [Step(int(r[2]), int(r[1]), float(r[3]), int(r[4])) for r in rows if len(r) == 5]


def is_warm(log: bytes) -> bool:
    """As many standbys have become warm as workers were started, and one more."""
    return log.count(b" is warm") >= log.count(b"; starting ranks")


def below(pid: int) -> list[int]:
    """The process's descendants."""
    rows = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid="], text=True).splitlines()
    parents = {int(child): int(parent) for child, parent in map(str.split, rows)}
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return sorted(found - {pid})


def turn(cluster: Cluster) -> dict[str, float | None]:
    """Of three nodes one is lost, comes again, and another leaves and comes again."""
    cluster.settle(NODES)
    lost_at = time.monotonic()
    cluster.lose("n3")
    after = cluster.first(NODES - 1, lost_at)
    seconds = {"lost: next step": None if after is None else after - lost_at}
    if after is None:
        return seconds
    cluster.settle(NODES - 1)
    came_at = time.monotonic()
    cluster.start("n3")
    together = cluster.first(NODES, came_at)
    seconds["came: first step"] = None if together is None else together - came_at
    if together is None:
        return seconds
    seconds["came: pause"] = together - cluster.last(NODES - 1, together)
    cluster.settle(NODES)
    left_at = time.monotonic()
    agent = cluster.leave("n2")
    apart = cluster.first(NODES - 1, left_at)
    seconds["left: pause"] = None if apart is None else apart - cluster.last(NODES, apart)
    agent.wait(START_SECONDS)
    if apart is not None:
        cluster.start("n2")
    return seconds


@contextlib.contextmanager
def ours(root: Path) -> Iterator[Command]:
    with etcd_cluster(root / "etcd") as etcd:
        host, port = etcd.endpoints[0]
        yield lambda name: [
            *("elastic", "run", "--rdzv-backend", "etcd3", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "bench"),
            *("--nnodes", f"1:{NODES}", "--node-id", name, "--lease-ttl", str(TTL_SECONDS), "--http", "127.0.0.1:0"),
            *("--standby", "--max-restarts", "100"),
        ]


@contextlib.contextmanager
def theirs(_: Path) -> Iterator[Command]:
    port = free_ports(1)[0]
    yield lambda name: [
        *("torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-id", "bench", "--rdzv-conf", f"is_host={int(name == 'n1')}", "--nnodes", f"1:{NODES}"),
        *("--max-restarts", "100"),
    ]


def measure(make: Callable[[Path], contextlib.AbstractContextManager[Command]], turns: int, limit: float) -> Measured:
    found: Measured = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster(root / "job", stack.enter_context(make(root)), limit)
        stack.callback(cluster.close)
        for number in range(1, NODES + 1):
            cluster.start(f"n{number}")
        for _ in range(turns):
            seconds = turn(cluster)
            for name, value in seconds.items():
                found.setdefault(name, []).append(value)
            if None in seconds.values():
                break
    return found


Measured = dict[str, list[float | None]]


def shown(values: list[float | None], limit: float) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):8.2f}" if len(known) == len(values) and known else f"> {limit:6.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each of them")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind
    print(f"{NODES} nodes of one rank, lease {TTL_SECONDS} s, seconds, medians of {given.turns}", flush=True)
    own, rival = measure(ours, given.turns, given.limit), measure(theirs, given.turns, given.limit)
    print(f"{'':18} {'elasticd':>8} {'torchrun':>9} {'goal':>6}")
    for name, values in own.items():
        other = shown(rival[name], given.limit) if name in rival else "-"
        goal = f"{GOALS[name]:6.1f}" if name in GOALS else ""
        print(f"{name:18} {shown(values, given.limit):>8} {other:>9} {goal:>6}", flush=True)


if __name__ == "__main__":
    main()
