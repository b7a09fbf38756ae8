"""A scrape of an agent with eight workers: real progress blocks, the real collector and server, no torch processes."""

from __future__ import annotations

import http.client
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from tests.metrics.support import Node

_SCRAPES = 100
_LIMIT_SECONDS = 0.020


def run() -> dict[str, Any]:
    """Median and worst of many scrapes over HTTP, and how much one holds."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), workers=8)
        for _ in range(3):  # earlier rounds have left totals
            node.start_round()
            _train(node)
            node.end_round()
        node.start_round()
        _train(node)
        server = StatusServer(
            bind_tcp("127.0.0.1", 0), None, Site(status=node.status, healthy=lambda: True, metrics=node.exposition.text)
        )
        try:
            _scrape(server.port, "")
            seconds = {
                accept: _measure(server.port, accept) for accept in ("text/plain", "application/openmetrics-text")
            }
            body = _scrape(server.port, "")
        finally:
            server.close()
            node.end_round()
    medians = {accept: statistics.median(times) for accept, times in seconds.items()}
    return {
        "scrape_seconds_median": medians["text/plain"],
        "scrape_seconds_median_openmetrics": medians["application/openmetrics-text"],
        "scrape_seconds_worst": max(max(times) for times in seconds.values()),
        "series": sum(1 for line in body.splitlines() if line and not line.startswith(b"#")),
        "bytes": len(body),
        "limit_seconds": _LIMIT_SECONDS,
        "ok": max(medians.values()) <= _LIMIT_SECONDS,
    }


def _train(node: Node) -> None:
    for writer in node.writers.values():
        writer.update(
            step=5, first_step_at=1.0, loss=1.0, learning_rate=0.1, grad_norm=1.0, weights_bytes=1, slowdown=1.0
        )
        writer.observe({"data": 0.01, "forward_backward": 0.1, "optimizer": 0.01})


def _measure(port: int, accept: str) -> list[float]:
    times = []
    for _ in range(_SCRAPES):
        began = time.perf_counter()
        _scrape(port, accept)
        times.append(time.perf_counter() - began)
    return times


def _scrape(port: int, accept: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        return connection.getresponse().read()
    finally:
        connection.close()


if __name__ == "__main__":
    figures = run()
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    sys.exit(not figures["ok"])
