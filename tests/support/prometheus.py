"""Debian's Prometheus with our rules, as a process of the test's."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic.metrics import dashboards
from tests.support.job import wait_for


class Prometheus:
    def __init__(self, port: int) -> None:
        self.port = port

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query; fails on one that Prometheus refuses."""
        target = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(target, timeout=10) as response:
                found: list[dict[str, Any]] = json.load(response)["data"]["result"]
                return found
        except urllib.error.HTTPError as exc:
            if exc.code == 503:  # it is still starting
                raise
            raise AssertionError(f"{expression}: {exc.read().decode()}") from exc


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def static(targets: Sequence[str]) -> dict[str, Any]:
    """A scrape configuration for these HOST:PORT."""
    return {"static_configs": [{"targets": list(targets)}]}


@contextlib.contextmanager
def prometheus(folder: Path, scrape: dict[str, Any], *, agents: int, every: str = "250ms") -> Iterator[Prometheus]:
    """With our rules, once it scrapes that many agents."""
    folder.mkdir(exist_ok=True)
    dashboards.write(folder)
    config = {
        "global": {"scrape_interval": every, "evaluation_interval": "500ms"},
        "rule_files": ["elasticd-rules.yml"],
        "scrape_configs": [{"job_name": "elasticd", **scrape}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Prometheus(port)

    def is_up() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError):
            return len(server.query("up == 1")) == agents
        return False

    try:
        wait_for(is_up, seconds=30.0, what="Prometheus scrapes all agents")
        yield server
    finally:
        process.terminate()
        process.wait(20)
