"""What the README says in tables and examples is so: names that one looks for in it are those of the product."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.config import load
from elastic.errors import ExitCode
from elastic.flags import build_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """From that heading to the next of any level."""
    return re.split(r"\n#{2,3} ", README.partition(f"# {title}\n")[2])[0]


def test_the_job_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"<!-- a test reads this block -->\n```toml\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "llm.toml").write_text(text.replace("/opt/llm/train.py", "train.py"))
    config = load(["--config", "llm.toml"], {})
    assert (config.run_id, config.min_nodes, config.max_nodes, config.nproc_per_node) == ("llm", 2, 4, 8)
    assert (config.checkpoint_every, config.hang_timeout_seconds, config.rdzv_backend) == ("300s", 600.0, "etcd3")


def test_each_alert_has_a_line() -> None:
    rules = (ROOT / "elastic/metrics/prometheus/elasticd-rules.yml").read_text()
    told = set(re.findall(r"`(Elasticd\w+)`", section("Metrics")))
    assert told == set(re.findall(r"- alert: (\w+)", rules))


def test_each_exit_code_has_a_line() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)}
    assert told == {int(code) for code in ExitCode}


def test_the_flags_that_are_named_exist() -> None:
    known = set(build_parser()._option_string_actions)
    told = set(re.findall(r"^\| ((?:`--[a-z0-9-]+.*?`,? ?)+) \|", section("Settings"), re.MULTILINE))
    flags = {flag for cell in told for flag in re.findall(r"--[a-z0-9-]+", cell)}
    assert len(flags) > 20
    assert flags <= known, flags - known


def test_links_within_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([^)]+)\)", README))
    assert links <= anchors, links - anchors
