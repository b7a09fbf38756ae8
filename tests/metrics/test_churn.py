"""A real Prometheus finds real agents on etcd by their /sd, while 30 workers are killed and a node comes and goes."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.agent.test_metrics import port_of
from tests.e2e.nodes import Nodes
from tests.metrics.test_dashboards import exported
from tests.support.etcd import etcd_cluster
from tests.support.job import wait_for
from tests.support.prometheus import Prometheus, prometheus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian) is not on PATH"),
]
KILLS = 30
STAYING = "a", "b"
SERIES = 'count({__name__=~"elasticd_.*", job="elasticd", node=~"a|b"}) by (node)'


def series_by_node(server: Prometheus) -> dict[str, int]:
    return {sample["metric"]["node"]: int(float(sample["value"][1])) for sample in server.query(SERIES)}


def ranks_by_node(server: Prometheus) -> dict[str, set[str]]:
    """The local ranks that have a series of now."""
    found: dict[str, set[str]] = {}
    for sample in server.query('elasticd_step{job="elasticd"}'):
        found.setdefault(sample["metric"]["node"], set()).add(sample["metric"]["local_rank"])
    return found


def is_scraped(server: Prometheus, since: float, nodes: tuple[str, ...]) -> bool:
    stamps = {
        s["metric"]["node"]: float(s["value"][1]) for s in server.query('timestamp(elasticd_round{job="elasticd"})')
    }
    return all(stamps.get(node, 0.0) > since for node in nodes)


def check(server: Prometheus, nodes: tuple[str, ...], before: dict[str, int]) -> dict[str, int]:
    """After a scrape of what there is now: as many series as ever, and of the ranks that live alone."""
    now = time.time()
    wait_for(lambda: is_scraped(server, now, nodes), seconds=30.0, what="all agents are scraped")
    wait_for(
        lambda: ranks_by_node(server) == {node: {"0", "1"} for node in nodes},
        seconds=30.0,
        what=f"there are the ranks of {nodes} and no others: {ranks_by_node(server)}",
    )
    if before:
        wait_for(
            lambda: series_by_node(server) == before,
            seconds=30.0,
            what=f"series {series_by_node(server)}, before {before}",
        )
    return series_by_node(server)


def test_series_stay_the_same_counters_never_fall_and_no_rank_is_a_ghost(tmp_path: Path) -> None:
    draw = random.Random(5)
    settings = ("--nnodes", "2:3", "--last-call", "0.5", "--nproc-per-node", "2", "--max-restarts", "100")
    with etcd_cluster(tmp_path) as cluster:
        nodes = Nodes(tmp_path, cluster, "churn", *settings)
        try:
            nodes.start(*STAYING)
            nodes.wait_running(4)
            urls = [f"http://127.0.0.1:{port_of(nodes.jobs[name])}/sd" for name in STAYING]
            scrape = {
                "http_sd_configs": [{"url": url, "refresh_interval": "1s"} for url in urls],
                "relabel_configs": [{"source_labels": ["__meta_elasticd_node_id"], "target_label": "node"}],
            }
            with prometheus(tmp_path / "prometheus", scrape, agents=2) as server:
                series = check(server, STAYING, {})
                kill_some(nodes, server, draw, series, kills=KILLS // 3, world=4)
                nodes.start("c")
                nodes.wait_running(6, after=nodes.wait_running(4, *STAYING)["round"])
                check(server, (*STAYING, "c"), series)
                kill_some(nodes, server, draw, series, kills=KILLS // 3, world=6)
                nodes.jobs["c"].signal(signal.SIGTERM)
                assert nodes.jobs.pop("c").wait(120) in (143, 5), nodes.output
                nodes.wait_running(4)
                check(server, STAYING, series)
                kill_some(nodes, server, draw, series, kills=KILLS // 3, world=4)
                assert_nothing_fell(server)
                restarts = server.query('sum(elasticd_restarts_total{reason="worker_failed"})')
                assert float(restarts[0]["value"][1]) == KILLS
        finally:
            nodes.close()


def kill_some(
    nodes: Nodes, server: Prometheus, draw: random.Random, series: dict[str, int], *, kills: int, world: int
) -> None:
    """Workers at random, one after another, each once the job trains again."""
    for _ in range(kills):
        before = nodes.wait_running(world)
        name = draw.choice(sorted(nodes.jobs))
        status = nodes.jobs[name].status()
        assert status is not None
        os.kill(draw.choice(status["workers"])["pid"], signal.SIGKILL)
        nodes.wait_running(world, after=before["round"])
    check(server, tuple(sorted(nodes.jobs)), series)


def assert_nothing_fell(server: Prometheus) -> None:
    for name in sorted(exported()):
        if re.search(r"_(total|bucket|count|sum)$", name):
            fallen = server.query(f'resets({name}{{node=~"a|b"}}[15m]) > 0')
            assert not fallen, fallen
