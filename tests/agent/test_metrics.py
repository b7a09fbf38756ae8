"""`/metrics` of a real agent while its workers are killed, on TCP and the unix socket; what outlives the agent."""

from __future__ import annotations

import http.client
import os
import re
import signal
from pathlib import Path

from elastic import runtime
from tests.metrics.support import Series, names, series_of, value
from tests.support.job import Job, running, wait_for, write

QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2", "--max-restarts", "50")
WORKER = """
import os, time
from pathlib import Path
from elastic.progress import ENVIRONMENT_KEY, Outcome, ProgressWriter
rank, round_number = int(os.environ["RANK"]), int(os.environ["ELASTICD_ROUND"])
block = ProgressWriter(Path(os.environ[ENVIRONMENT_KEY]))
ids = dict(pid=os.getpid(), rank=rank, local_rank=rank, round=round_number, world_size=2)
block.update(**ids, started_at=time.monotonic(), step=0, base_step=0, in_loop=1)
counted = Path(f"counted-{rank}-{round_number}")
for step in range(1, 100000):
    time.sleep(0.01)
    marks = {"first_step_at": time.monotonic()} if step == 1 else {}
    block.update(step=step, loss=1 / step, samples_total=4 * step, weights_bytes=100, **marks)
    block.observe({"data": 0.001, "forward_backward": 0.009})
    counted.write_text(str(4 * step))
    if block.drain_requested:
        block.update(outcome=Outcome.DRAINED, disk_step=step)
        break
"""


def port_of(job: Job) -> int:
    found = wait_for(
        lambda: re.search(r"http://127\.0\.0\.1:(\d+)/status", job.output), what="the agent names its port"
    )
    return int(found[1])


def scrape(job: Job) -> Series:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(job), timeout=10)
    try:
        connection.request("GET", "/metrics", headers={"Accept": "text/plain;version=0.0.4"})
        response = connection.getresponse()
        assert response.status == 200
        return series_of(response.read().decode())
    finally:
        connection.close()


def kept(series: Series) -> Series:
    return {k: v for k, v in series.items() if k[0].endswith(("_total", "_bucket", "_count", "_sum"))}


def test_counters_go_on_and_series_stay_the_same_while_workers_are_killed(tmp_path: Path) -> None:
    write(tmp_path, "worker.py", WORKER)
    with running(tmp_path, *QUICK, "worker.py") as job:
        job.wait_step(3)
        before = scrape(job)
        assert value(before, "agent_state", state="running") == 1
        assert "round 1: running, 2 ranks\n" in job.output
        for kills in range(1, 6):
            status = job.status()
            assert status is not None
            os.kill(status["workers"][kills % 2]["pid"], signal.SIGKILL)
            job.wait_status(lambda s, n=kills: len([i for i in s["incidents"] if i["seconds"]["total"]]) == n)
            job.wait_step(3)
            after = scrape(job)
            assert after.keys() == before.keys()
            fallen = [key for key, old in kept(before).items() if kept(after)[key] < old]
            assert not fallen
            assert value(after, "restarts_total", reason="worker_failed") == kills
            before = after
        status = job.wait_status(lambda s: len(s["incidents"]) == 5)
        assert value(before, "lost_steps_total") == sum(incident["lost_steps"] for incident in status["incidents"])
        assert value(before, "recovery_seconds_count", phase="total") == 5
        assert value(before, "rendezvous_seconds_count") == 6
        assert value(before, "restarts_remaining") == 45
        assert 0 < value(before, "goodput_ratio") < 1
        assert value(before, "time_seconds_total", kind="repeated") > 0
        for rank in (0, 1):
            reached = [int(p.read_text() or "0") for p in tmp_path.glob(f"counted-{rank}-[1-5]")]
            assert len(reached) == 5
            # A worker killed between two lines has told its block one step more than its file.
            assert sum(reached) <= value(before, "samples_total", local_rank=str(rank)) - 8
        assert value(before, "scrape_errors_total") == 0
        assert {name for name in names(before) if not name.startswith("elasticd_")} == set()
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output


def test_the_socket_gives_the_same_and_the_next_agent_remembers_the_goodput(tmp_path: Path) -> None:
    write(tmp_path, "worker.py", WORKER)
    args = (*QUICK, "--checkpoint-dir", str(tmp_path / "kept"), "--rdzv-id", "train", "--node-id", "n1", "worker.py")
    with running(tmp_path, *args) as job:
        job.wait_step(20)
        path = runtime.socket_path(job.runtime, job.process.pid)
        with runtime.connect(path, 5.0) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"application/openmetrics-text" in answer
        assert b'elasticd_job_info{node_id="n1",run_id="train"} 1.0' in answer
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    (account,) = (tmp_path / "kept").glob(".goodput-*.json")
    assert '"closed": true' in account.read_text()
    account.write_text('{"seconds": {"steps": 1e9}, "unix_time": 0, "closed": true}')
    with running(tmp_path, *args) as job:
        job.wait_step(3)
        assert value(scrape(job), "goodput_ratio") > 0.999
