"""Joining and re-forming by N nodes: this rendezvous on etcd beside torch's dynamic one over c10d, in one harness.

Nodes are simulated: no workers, hundreds in a process, a few processes, all on this host. Seconds count from the moment
when all nodes are told to join until the last of them has seen the round with all N; then from the moment just before
one node's lease ends, all the others stop their workers, until the last of them has seen the round with N - 1. What it
takes to notice a loss, the lease's ttl there and three missed heartbeats here, is not in these figures.

    python -m tests.bench.bench_rendezvous [--nodes 8,32,128] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.rendezvous.agents import Agents
from tests.bench.rendezvous.figures import HEADER, Measured, curve, row
from tests.bench.rendezvous.fleet import Fleet, Party, Share, TooSlowError, shares
from tests.support.etcd import etcd_cluster, free_ports

NODES = (8, 32, 128, 512, 1000)
RUN_ID = "bench"
OUR_LIMIT_SECONDS = 60.0
GOAL_SECONDS = 5.0  # for the joins of 1,000 nodes


def ours(share: Share) -> Party:
    return Agents(share)


def theirs(share: Share) -> Party:
    """torch is imported in its own processes only."""
    from tests.bench.rendezvous.c10d import Handlers

    return Handlers(share)


def measure(make: Callable[[Share], Party], dealt: Sequence[Share], limit_seconds: float) -> Measured:
    """One fleet: it joins, loses one node and re-forms. The limit holds for each of the two."""
    nodes = dealt[0].total
    measured = Measured(nodes=nodes, limit_seconds=limit_seconds)
    try:
        with Fleet(make, dealt) as fleet:
            began = time.monotonic()
            fleet.call("join", seconds=limit_seconds)
            took = formed(fleet, nodes, began + limit_seconds) - began
            joined = counts(fleet)
            measured = dataclasses.replace(measured, join_seconds=took, join_counts=joined)
            lost = fleet.call_first("lose", seconds=limit_seconds)
            fleet.call("resume", seconds=limit_seconds)
            took = formed(fleet, nodes - 1, lost + limit_seconds) - lost
            return dataclasses.replace(measured, form_seconds=took, form_counts=counts(fleet) - joined)
    except TooSlowError:
        return measured


def formed(fleet: Fleet, members: int, deadline: float) -> float:
    """Monotonic time at which the last node saw it. Raises: TooSlowError."""
    left = max(0.0, deadline - time.monotonic())
    times = fleet.call("formed", members, left, seconds=left + 5.0)
    if None in times:
        raise TooSlowError
    return float(max(times))


def counts(fleet: Fleet) -> Counter[str]:
    total: Counter[str] = Counter()
    for counted in fleet.call("counts"):
        total.update(counted)
    return total


def run(arguments: argparse.Namespace) -> tuple[list[Measured], list[Measured]]:
    """Both for each number of nodes; c10d up to the first that is not within its limit."""
    own: list[Measured] = []
    rival: list[Measured] = []
    for nodes in arguments.nodes:
        settings = {"run_id": RUN_ID, "ttl_seconds": arguments.ttl}
        with tempfile.TemporaryDirectory() as folder, etcd_cluster(Path(folder) / "etcd") as cluster:
            dealt = shares(nodes, arguments.processes, port=cluster.endpoints[0][1], **settings)
            own.append(measure(ours, dealt, OUR_LIMIT_SECONDS))
        other = None
        if all(m.form_seconds is not None for m in rival):
            dealt = shares(nodes, arguments.processes, port=free_ports(1)[0], **settings)
            other = measure(theirs, dealt, arguments.limit)
            rival.append(other)
        print(row(own[-1], other), flush=True)
        for name in ("expulsions", "retries", "errors", "unknown_writes", "gaps"):
            if count := own[-1].count(name):
                print(f"{'':6} with {count} {name}: this machine was too slow for so many nodes")
    return own, rival


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=numbers, default=NODES, help="how many, from few to many: 8,32")
    parser.add_argument("--processes", type=int, default=2, help="that hold them")
    parser.add_argument(
        "--ttl", type=int, default=30, help="of the leases; long, for all nodes share this host's cores"
    )
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for c10d to join, and to re-form")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where the curve goes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    print(f"{arguments.processes} processes on {os.cpu_count()} cores, one etcd beside them\n{HEADER}", flush=True)
    own, rival = run(arguments)
    last = own[-1]
    print(
        "\noperations: without lease renewals (beside them), which go by time: six in a ttl."
        "\nbytes of join and re-form: `round` names all members and is read by all, so it is O(N) for each;"
        "\n`news` is what the leader tells all nodes at a bounded rate; `own` is everything else, sent and received."
    )
    if last.nodes == max(NODES):
        took = f"{last.join_seconds:.2f} s" if last.join_seconds is not None else f"more than {last.limit_seconds:g} s"
        print(f"{last.nodes} joins: {took}; at most {GOAL_SECONDS:g} s are wanted")
    path = arguments.out / "rendezvous.png"
    print(f"curve: {path}" if curve(own, rival, path) else "PNG needs matplotlib: pip install '.[bench]'")
    return 0 if all(m.form_seconds is not None for m in own) else 1


def numbers(text: str) -> tuple[int, ...]:
    """Raises: argparse.ArgumentTypeError."""
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no comma list of whole numbers, such as 8,32") from exc
    if values[0] < 3:
        raise argparse.ArgumentTypeError(f"{values[0]} nodes are too few to lose one and re-form: at least 3")
    return values


if __name__ == "__main__":
    sys.exit(main())
