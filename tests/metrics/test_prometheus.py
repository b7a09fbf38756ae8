"""A real Prometheus scrapes two agents' servers through worker churn; every panel and recording rule returns data."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from elastic.metrics.site import target as target_of
from elastic.progress import Phase
from elastic.status import Incident, IncidentSeconds
from tests.metrics.support import Node
from tests.metrics.test_dashboards import exported, panels
from tests.support.job import wait_for
from tests.support.prometheus import Prometheus, prometheus, static

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian) is not on PATH")

NOT_HERE = ("elasticd_gpu_", "elasticd_memory_shared_bytes")  # no GPU, and no folder of an agent's


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[tuple[Node, StatusServer]]]:
    made = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        node = Node(folder)
        node.start_round()
        made.append(
            (
                node,
                StatusServer(
                    bind_tcp("127.0.0.1", 0),
                    None,
                    Site(status=node.status, healthy=lambda: True, metrics=node.exposition.text),
                ),
            )
        )
    yield made
    for node, server in made:
        server.close()
        node.end_round()


def train(node: Node, step: int) -> None:
    """One step of every worker, with something of all that they can tell."""
    for writer in node.writers.values():
        writer.update(
            phase=Phase.DATA,
            step=step,
            first_step_at=1.0,
            loss=1.0,
            learning_rate=0.1,
            grad_norm=1.0,
            slowdown=1.0,
            bus_bandwidth=1e9,
            weights_bytes=4,
            gradients_bytes=4,
            optimizer_bytes=8,
            device_allocated_bytes=16,
            device_reserved_bytes=32,
            device_peak_bytes=32,
            commit_unix_time=time.time(),
            memory_unix_time=time.time(),
        )
        writer.add(samples_total=8, tokens_total=64, comm_bytes_total=400, comm_seconds_total=0.01, grad_syncs_total=1)
        writer.add(checkpoint_bytes_total=100, comm_exposed_seconds_total=0.001)
        writer.observe(dict.fromkeys(("data", "forward_backward", "comm_exposed", "optimizer"), 0.01))
        writer.observe(dict.fromkeys(("checkpoint", "checkpoint_stall", "checkpoint_write"), 0.02))


def note(node: Node, *, is_leader: bool) -> None:
    seconds = IncidentSeconds(detect=0.1, stop=0.1, rendezvous=0.1, start=0.1, restore=0.1, first_step=0.1, total=0.6)
    incidents = tuple(
        Incident(time=float(n), cause="rank 0 killed", round=n, lost_steps=1, seconds=seconds)
        for n in range(2, node.round + 1)
    )
    status = node.status(incidents=incidents)
    node.record.note(status, cause="rank 0 killed", is_leader=is_leader, now=time.monotonic())


def test_prometheus_gets_the_same_series_through_churn_and_every_panel_has_data(
    tmp_path: Path, nodes: list[tuple[Node, StatusServer]]
) -> None:
    counts = 'count({__name__=~"elasticd_.*", job="elasticd"}) by (instance)'
    with prometheus(tmp_path, static([f"127.0.0.1:{server.port}" for _, server in nodes]), agents=2) as server:
        scraped = seen = 0.0

        def scraped_since() -> bool:
            stamps = [float(s["value"][1]) for s in server.query('timestamp(elasticd_round{job="elasticd"})')]
            return len(stamps) == 2 and min(stamps) > scraped

        for round_number in range(6):
            if round_number:
                for node, _ in nodes:
                    node.end_round()
                    node.start_round()
            for step in range(1, 6):
                for position, (node, _) in enumerate(nodes):
                    train(node, step)
                    note(node, is_leader=position == 0)
                scraped = time.time()
                wait_for(scraped_since, seconds=20.0, what="both agents are scraped")
            sizes = {s["metric"]["instance"]: float(s["value"][1]) for s in server.query(counts)}
            assert len(sizes) == 2
            assert seen in (0.0, sum(sizes.values())), "the number of series changed"
            seen = sum(sizes.values())
        for name in sorted(exported()):
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                assert not server.query(f"resets({name}[5m]) > 0"), name
        ranks = server.query('count by (local_rank) (elasticd_step{job="elasticd"})')
        assert {s["metric"]["local_rank"] for s in ranks} == {"0", "1"}
        restarts = server.query('sum(elasticd_restarts_total{reason="worker_failed"})')
        assert float(restarts[0]["value"][1]) == 5, "two agents saw them, and the leader counted"
        assert_every_panel_has_data(server)
        for recorded in ("samples_per_second", "steps_per_second", "goodput_ratio", "comm_exposed_ratio"):
            wait_for(lambda n=recorded: server.query(f"elasticd:run:{n}"), seconds=20.0, what=recorded)


def assert_every_panel_has_data(server: Prometheus) -> None:
    empty = []
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$run", "train").replace("$node", ".*")
            result = server.query(query)
            if not result and not any(name in query for name in NOT_HERE):
                empty.append((panel["title"], query))
    # Time per renewal is that of a lease, and these agents have none: 0 / 0 is there, and no number.
    assert not empty


def test_prometheus_finds_all_agents_by_asking_one(tmp_path: Path, nodes: list[tuple[Node, StatusServer]]) -> None:
    found = [
        target_of(f"127.0.0.1:{server.port}", run_id="train", node_id=f"n{n}") for n, (_, server) in enumerate(nodes)
    ]
    site = Site(status=nodes[0][0].status, healthy=lambda: True, targets=lambda: found)
    asked = StatusServer(bind_tcp("127.0.0.1", 0), None, site)
    relabel = [{"source_labels": ["__meta_elasticd_node_id"], "target_label": "node"}]
    scrape = {"http_sd_configs": [{"url": f"http://127.0.0.1:{asked.port}/sd"}], "relabel_configs": relabel}
    try:
        with prometheus(tmp_path / "prometheus", scrape, agents=2) as server:
            assert {sample["metric"]["node"] for sample in server.query("up")} == {"n0", "n1"}
            runs = wait_for(lambda: server.query("elasticd_job_info"), what="the first scrape is in")
            assert {sample["metric"]["run_id"] for sample in runs} == {"train"}, "a target's name does not hide ours"
    finally:
        asked.close()
