"""The page at `/` in headless Chromium, with a real agent behind it whose workers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_metrics import port_of
from tests.support import browser as browsers
from tests.support.browser import Browser, browser
from tests.support.job import Job, running, wait_for, write

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsers.DRIVER is None or browsers.CHROMIUM is None, reason=browsers.MISSING),
]

HOSTILE, HOSTILE_NAME = "<img src=x onerror=document.title='owned'>", "<b>bold"
WORKER = """
import math, os, sys, time
from pathlib import Path
from elastic.progress import ENVIRONMENT_KEY, Outcome, Phase, ProgressWriter
rank, round_number = int(os.environ["RANK"]), int(os.environ["ELASTICD_ROUND"])
block = ProgressWriter(Path(os.environ[ENVIRONMENT_KEY]))
kept = Path(f"kept-{rank}")
base = int(kept.read_text() or "0") if kept.exists() else 0
block.update(pid=os.getpid(), rank=rank, local_rank=rank, round=round_number, world_size=2,
             started_at=time.monotonic(), restore_began_at=time.monotonic())
time.sleep(0.03)
block.update(step=base, base_step=base, in_loop=1, disk_step=base, memory_step=base, restore_ended_at=time.monotonic())
for step in range(base + 1, 1000000):
    seconds = 0.02 + 0.002 * math.sin(step / 40)
    time.sleep(seconds)
    marks = {"first_step_at": time.monotonic()} if step == base + 1 else {}
    marks["failed_saves"] = 2 * Path("disk-full").exists()
    if step % 3 == 0:
        marks["memory_step"], marks["memory_unix_time"] = step, time.time()
        kept.write_text(str(step))
    if step % 200 == 0:
        marks["disk_step"], marks["commit_unix_time"] = step, time.time()
    loss = 1.7 + 3.7 * math.exp(-step / 400) + 0.05 * math.sin(step * 1.7)
    block.update(step=step, loss=loss, step_seconds=seconds, progressed_at=time.monotonic(),
                 slowdown=1.31 if rank and os.environ.get("SLOW") else 1.0, phase=Phase.FORWARD_BACKWARD, **marks)
    if Path("raise").exists() and rank == 1 and round_number == 1:
        raise ValueError(Path("raise").read_text())
    if block.drain_requested:
        block.update(outcome=Outcome.DRAINED, disk_step=step)
        break
"""
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2", "--max-restarts", "5")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        made.look(width=1280, dark=False)
        yield made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    write(tmp_path, "worker.py", WORKER)
    args = ("--rdzv-id", "page-test", "--node-id", "node-1", "worker.py")
    with running(tmp_path, *QUICK, *args, environ={"SLOW": "1"}) as made:
        made.wait_step(3)
        yield made


def open_page(window: Browser, job: Job) -> None:
    window.open("about:blank")  # the page of the last test's agent, which is gone, asks for it as long as it is open
    window.console()
    window.open(f"http://127.0.0.1:{port_of(job)}/")
    wait_for(lambda: window.text("#word") == "Training", what="the page says that it trains")


def points(window: Browser, chart: str) -> int:
    return int(window.run("return document.querySelector(arguments[0]).dataset.points ?? 0", f"[data-chart={chart}]"))


def curve(window: Browser, chart: str) -> str:
    return str(
        window.run("return document.querySelector(arguments[0])?.getAttribute('d')", f"[data-chart={chart}] .curve")
    )


def cells(window: Browser) -> dict[str, str]:
    """Rank -> state, as the map of ranks has them."""
    script = "return [...document.querySelectorAll('.cell')].map((c) => [c.dataset.rank, c.dataset.state])"
    return dict(window.run(script))


def test_the_page_loads_without_a_complaint_and_its_curves_move(window: Browser, job: Job) -> None:
    open_page(window, job)
    assert cells(window) == {"0": "running", "1": "running"}
    assert window.text("#incidents") == "None since this agent began."
    for chart in ("loss", "pace", "world"):
        wait_for(lambda c=chart: points(window, c) >= 2, what=f"the curve of {chart} is there")
    before, seen = curve(window, "loss"), points(window, "loss")
    wait_for(lambda: points(window, "loss") > seen and curve(window, "loss") != before, what="the curve moves")
    assert "page-test" in window.run("return document.title")
    assert "1.3" in window.text("[data-rank='1']"), "the slow one is shown"
    full = write(job.folder, "disk-full", "")
    wait_for(lambda: "2 saves failed since: " in window.text("#checkpoints"), what="saves fail")
    full.unlink()
    wait_for(lambda: "failed" not in window.text("#checkpoints"), what="one has succeeded")
    assert window.console() == []


def test_an_incident_appears_after_a_kill_and_says_what_it_cost(window: Browser, job: Job) -> None:
    open_page(window, job)
    status = job.status()
    assert status is not None
    os.kill(status["workers"][1]["pid"], signal.SIGKILL)
    wait_for(lambda: "back in" in window.text("#incidents"), what="the incident is there")
    incident = window.text("#incidents")
    assert "Rank 1 killed by SIGKILL" in incident
    assert "round 2" in incident
    assert "repeated" in incident or "no step lost" in incident
    wait_for(lambda: window.text("#word") == "Training", what="it trains again")
    assert "Training again after" in window.text("#story")
    assert "SIGKILL" in window.text("#failure")
    segments = window.run("return document.querySelectorAll('#incidents .seg').length")
    assert segments == 6, "every phase of the recovery is drawn"
    wait_for(lambda: window.run("return document.querySelectorAll('[data-chart=world] .event').length") == 1, what="")
    assert window.console() == []


def test_an_agent_that_is_gone_or_frozen_is_named_and_forgiven(window: Browser, job: Job) -> None:
    open_page(window, job)
    job.signal(signal.SIGSTOP)
    wait_for(lambda: "does not answer" in window.text("#lost"), what="the page says so")
    assert window.text("#word") == "No answer"
    job.signal(signal.SIGCONT)
    wait_for(lambda: window.text("#lost") == "" and window.text("#word") != "No answer", what="the page has forgiven")


def test_what_comes_from_outside_stays_text(window: Browser, tmp_path: Path) -> None:
    write(tmp_path, "worker.py", WORKER)
    (tmp_path / "raise").write_text(HOSTILE)
    with running(tmp_path, *QUICK, "--rdzv-id", HOSTILE_NAME, "--node-id", HOSTILE_NAME, "worker.py") as job:
        job.wait_status(lambda s: s["incidents"] and s["incidents"][0]["seconds"]["total"])
        open_page(window, job)
        wait_for(lambda: HOSTILE in window.text("#incidents"), what="the message is shown as it is")
        assert HOSTILE_NAME in window.text("#job")
        assert HOSTILE_NAME in window.text("#ranks")
        assert window.run("return document.images.length") == 0
        assert window.run("return document.querySelectorAll('#job b, #ranks h3 b').length") == 0
        assert window.run("return document.title") != "owned"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_nothing_is_wider_than_the_window(window: Browser, job: Job, tmp_path: Path, width: int, dark: bool) -> None:
    window.look(width=width, dark=dark)
    try:
        open_page(window, job)
        wait_for(lambda: points(window, "loss") >= 2, what="the curves are there")
        assert window.run("return document.documentElement.scrollWidth") <= width
        assert low_contrast(window) == []
        shots = os.environ.get("PAGE_SCREENSHOTS", str(tmp_path))
        window.screenshot(Path(shots) / f"page-{width}-{'dark' if dark else 'light'}.png")
    finally:
        window.look(width=1280, dark=False)


def low_contrast(window: Browser) -> list[Any]:
    """Text that stands out from its ground by less than 4.5 (WCAG AA), each with its ratio."""
    found: list[Any] = window.run(
        """
        const parts = (c) => c.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
          .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
          .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = (node) => {
          for (let n = node; n; n = n.parentElement) {
            const c = parts(getComputedStyle(n).backgroundColor);
            if (c.length < 4 || c[3] > 0.99) return c;
          }
          return [255, 255, 255];
        };
        const low = [];
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let text = walker.nextNode(); text; text = walker.nextNode()) {
          const node = text.parentElement, style = getComputedStyle(node);
          const unseen = ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(node.tagName) || !node.getClientRects().length;
          if (!text.data.trim() || unseen) continue;
          const ink = node instanceof SVGElement ? style.fill : style.color;
          const [a, b] = [light(parts(ink)), light(ground(node))];
          const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          if (ratio < 4.5) low.push([text.data.trim().slice(0, 40), ratio]);
        }
        return low;
        """
    )
    return found
