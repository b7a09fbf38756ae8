"""The shipped dashboard and rules: they name only what is exported, and Prometheus's own tool finds nothing wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic.cli import main
from elastic.metrics import dashboards
from elastic.metrics.catalogue import FAMILIES
from tests.metrics.support import Node

DASHBOARD = "elasticd.json"
RULES = "elasticd-rules.yml"
TITLES = ["Job", "Training", "Communication", "Memory", "Checkpoints", "Incidents"]
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not on PATH")


def exported() -> set[str]:
    """Every name that a query may use."""
    found = set()
    for name, family in FAMILIES.items():
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {f"elasticd_{name}{suffix}" for suffix in suffixes}
    return found


def dashboard() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(dashboards.shipped()[DASHBOARD])
    return parsed


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in dashboard()["annotations"]["list"]]
    return found + [variable["definition"] for variable in dashboard()["templating"]["list"][1:]]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\belasticd_\w+", text))


def labels_in(text: str) -> set[tuple[str, str, str]]:
    """(metric, label, value) of selectors that ask for one value."""
    found = set()
    for metric, selector in re.findall(r"(elasticd_\w+)\{([^}]*)\}", text):
        for label, _, value in re.findall(r'(\w+)(=~|=|!=)"([^"]*)"', selector):
            found |= {(metric, label, part) for part in value.split("|")}
    return found


def alerts() -> dict[str, str]:
    """Name -> its text in the file of rules."""
    found = dashboards.shipped()[RULES].split("- alert: ")[1:]
    return {text.split("\n", 1)[0].strip(): text for text in found}


def test_every_query_of_the_dashboard_names_metrics_that_are_exported() -> None:
    assert len(queries()) > 40
    for query in queries():
        assert names_in(query), query
        assert names_in(query) <= exported(), query


def test_every_rule_names_metrics_that_are_exported_or_recorded() -> None:
    text = dashboards.shipped()[RULES]
    expressions = "\n".join(re.findall(r"expr: (.*(?:\n {10,}.*)*)", text))
    assert names_in(expressions) <= exported()
    recorded = set(re.findall(r"- record: (\S+)", text))
    assert set(re.findall(r"elasticd:[\w:]+", text)) == recorded
    mentioned = names_in(text) - exported()
    assert not mentioned, f"named in a description and not exported: {mentioned}"


def test_selectors_ask_for_labels_and_values_that_exist(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.start_round()
    for writer in node.writers.values():
        writer.update(weights_bytes=1, disk_step=1, memory_unix_time=1.0, commit_unix_time=1.0)
    seen = {(name, label, value) for name, labels in node.scrape() for label, value in labels}
    node.end_round()
    wanted = labels_in("\n".join([*queries(), dashboards.shipped()[RULES]]))
    unknown = {ask for ask in wanted if not ask[2].startswith("$") and ask not in seen}
    assert not unknown


def test_each_panel_has_a_title_a_description_a_unit_and_its_place() -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard()["panels"]}
    assert len(places) == len(dashboard()["panels"])
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_the_rows_and_variables_are_those_of_the_design() -> None:
    assert [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"] == TITLES
    assert [v["name"] for v in dashboard()["templating"]["list"]] == ["datasource", "run", "node"]


def test_every_exported_metric_is_shown_or_alerted_on() -> None:
    used = names_in("\n".join([*queries(), dashboards.shipped()[RULES]]))
    unused = {
        name
        for name, family in FAMILIES.items()
        if not used & ({f"elasticd_{name}"} | {f"elasticd_{name}{s}" for s in ("_sum", "_count", "_bucket")})
    }
    assert unused == {"build_info"}


def test_each_alert_says_what_to_do() -> None:
    assert len(alerts()) >= 9
    for name, text in alerts().items():
        assert "severity:" in text, name
        assert "summary:" in text, name
        assert len(text.split("description:")[1]) > 100, name


def test_the_command_writes_both_and_replaces_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made" / "here"
    for _ in range(2):
        assert main(["dashboards", str(target)]) == 0
        written = capsys.readouterr().out.split()
        assert sorted(Path(path).name for path in written) == [RULES, DASHBOARD]
        assert json.loads((target / DASHBOARD).read_text())["title"] == "elasticd"
    (tmp_path / "file").touch()
    assert main(["dashboards", str(tmp_path / "file")]) == 2
    assert "is a file; name a directory" in capsys.readouterr().err


def tool(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60, check=False, **options)


@promtool
def test_promtool_finds_nothing_wrong_with_the_rules_and_the_metrics(tmp_path: Path) -> None:
    dashboards.write(tmp_path)
    checked = tool("check", "rules", str(tmp_path / RULES))
    assert checked.returncode == 0, checked.stderr
    node = Node(tmp_path)
    node.start_round()
    node.writers[0].update(step=1, first_step_at=1.0, loss=1.0, weights_bytes=1, slowdown=1.0, bus_bandwidth=1.0)
    body, _ = node.exposition.text("")
    node.end_round()
    linted = tool("check", "metrics", input=body.decode())
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")


HEALTHY = {
    'elasticd_job_info{job="elasticd",instance="a:1",run_id="train",node_id="a"}': "1x300",
    'elasticd_agent_state{job="elasticd",instance="a:1",state="running"}': "1x300",
    'elasticd_agent_state{job="elasticd",instance="a:1",state="waiting"}': "0x300",
    'elasticd_agent_state{job="elasticd",instance="a:1",state="closed"}': "0x300",
    'elasticd_step{job="elasticd",instance="a:1",local_rank="0"}': "0+10x300",
    'elasticd_goodput_ratio{job="elasticd",instance="a:1"}': "0.95x300",
    'elasticd_restarts_remaining{job="elasticd",instance="a:1"}': "3x300",
    'elasticd_restarts_total{job="elasticd",instance="a:1",reason="worker_failed"}': "0x300",
    'elasticd_checkpoint_last_commit_timestamp_seconds{job="elasticd",instance="a:1",tier="disk"}': "0+60x300",
    'elasticd_checkpoint_failures_total{job="elasticd",instance="a:1",tier="disk"}': "0x300",
    'elasticd_checkpoint_failures_total{job="elasticd",instance="a:1",tier="memory"}': "0x300",
    'elasticd_lease_renew_seconds_sum{job="elasticd",instance="a:1"}': "0+0.6x300",
    'elasticd_lease_renew_seconds_count{job="elasticd",instance="a:1"}': "0+60x300",
    'elasticd_store_errors_total{job="elasticd",instance="a:1"}': "0x300",
    'elasticd_slowdown_ratio{job="elasticd",instance="a:1",local_rank="0"}': "1x300",
    'elasticd_memory_host_used_bytes{job="elasticd",instance="a:1"}': "50x300",
    'elasticd_memory_host_limit_bytes{job="elasticd",instance="a:1"}': "100x300",
    'elasticd_gpu_memory_used_bytes{job="elasticd",instance="a:1",device="0"}': "99x300",
    'elasticd_gpu_memory_limit_bytes{job="elasticd",instance="a:1",device="0"}': "100x300",
    'elasticd_gpu_xid_errors_total{job="elasticd",instance="a:1",device="0"}': "1x300",
    'elasticd_gpu_last_xid{job="elasticd",instance="a:1",device="0"}': "79x300",
    'elasticd_memory_alloc_retries_total{job="elasticd",instance="a:1",local_rank="0"}': "0x300",
    'elasticd_scrape_errors_total{job="elasticd",instance="a:1"}': "0x300",
    'up{job="elasticd",instance="a:1"}': "1x300",
}
# Alert -> what is different in the series whose names hold the key, in the order of HEALTHY.
CAUSES = {
    "ElasticdTrainingStalled": {"elasticd_step{": "7x300"},
    "ElasticdWaitingForNodes": {'state="running"': "0x300", 'state="waiting"': "1x300", "elasticd_step{": "_x300"},
    "ElasticdGoodputLow": {"elasticd_goodput": "0.5x300"},
    "ElasticdRestartBudgetNearlySpent": {"elasticd_restarts_remaining": "1x300", "elasticd_restarts_total": "0+1x300"},
    "ElasticdCheckpointOld": {"elasticd_checkpoint_last": "0x300"},
    "ElasticdCheckpointsFailing": {'failures_total{job="elasticd",instance="a:1",tier="disk"': "0+1x300"},
    "ElasticdMemoryCheckpointsOff": {'failures_total{job="elasticd",instance="a:1",tier="memory"': "0x280 1x20"},
    "ElasticdLeaseTrouble": {"elasticd_lease_renew_seconds_sum": "0+60x300"},
    "ElasticdStraggler": {"elasticd_slowdown_ratio": "2x300"},
    "ElasticdMemoryNearLimit": {"elasticd_memory_host_used": "95x300"},
    "ElasticdDeviceMemoryNearLimit": {"elasticd_memory_alloc_retries": "0+1x300"},
    "ElasticdGpuError": {"elasticd_gpu_xid": "1x280 2x20"},
    "ElasticdExporterDown": {"up{": "0x300"},
    "ElasticdScrapeIncomplete": {"elasticd_scrape_errors": "0+1x300"},
}


def case(changes: dict[str, str], firing: list[str]) -> dict[str, Any]:
    series = []
    for name, values in HEALTHY.items():
        changed = next((new for key, new in changes.items() if key in name), values)
        series.append({"series": name, "values": changed})
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    query = 'sum by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": query, "eval_time": "290m", "exp_samples": samples}],
    }


@promtool
def test_each_alert_fires_when_caused_and_none_when_all_is_well(tmp_path: Path) -> None:
    assert set(CAUSES) == set(alerts())
    dashboards.write(tmp_path)
    cases = [case({}, []), *(case(changes, [name]) for name, changes in CAUSES.items())]
    store_is_away = {"elasticd_store_errors": "0+60x300"}
    cases.append(case(store_is_away, ["ElasticdLeaseTrouble"]))
    file = tmp_path / "cases.yml"
    file.write_text(json.dumps({"rule_files": [RULES], "evaluation_interval": "5m", "tests": cases}))  # JSON is YAML
    done = tool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
