"""The collector over real progress blocks: names, churn, damage, and what is constant."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from elastic.metrics.catalogue import FAMILIES, Samples
from elastic.metrics.gpu import Xids
from elastic.status import Incident, IncidentSeconds
from elastic.timings import BOUNDS
from tests.metrics.support import Node, Series, names, value

# Section 9 of the design, one line each, as the exposition names them.
CONTRACT = """
job_info build_info round world_size nodes agent_state restarts_total restarts_remaining lost_steps_total goodput_ratio
rendezvous_seconds recovery_seconds lease_renew_seconds store_errors_total
step samples_total tokens_total step_seconds loss learning_rate grad_norm skipped_steps_total
comm_bytes_total comm_seconds_total comm_exposed_seconds_total comm_bus_bandwidth_bytes_per_second grad_syncs_total
grad_syncs_skipped_total
memory_tensor_bytes memory_device_bytes memory_device_peak_bytes memory_host_rss_bytes memory_shared_bytes
memory_alloc_retries_total memory_ooms_total
checkpoint_stall_seconds checkpoint_write_seconds checkpoint_bytes_total checkpoint_committed_step
checkpoint_last_commit_timestamp_seconds checkpoint_failures_total
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end_round()


def counters(series: Series) -> Series:
    return {k: v for k, v in series.items() if k[0].endswith(("_total", "_bucket", "_count", "_sum"))}


def train(node: Node, local_rank: int, step: int) -> None:
    writer = node.writers[local_rank]
    writer.update(step=step, first_step_at=1.0, loss=0.5, learning_rate=0.1, grad_norm=1.0, weights_bytes=400)
    writer.add(samples_total=8, comm_bytes_total=1000, alloc_retries_total=1)
    writer.observe({"data": 0.002, "forward_backward": 0.2})


def test_every_name_of_the_contract_is_exported_with_help_and_the_unit_that_it_ends_in() -> None:
    assert set(FAMILIES) >= set(CONTRACT.split())
    for family in FAMILIES.values():
        assert family.help.endswith("."), family.name
        assert not family.unit or family.name.removesuffix("_total").endswith(family.unit), family.name
        for unit in ("seconds", "bytes", "ratio", "celsius", "watts"):
            assert family.unit or unit not in family.name.split("_"), f"{family.name} has no unit"


def test_counters_are_there_at_zero_before_any_worker(node: Node) -> None:
    series = node.scrape()
    assert value(series, "samples_total", local_rank="1") == 0
    assert value(series, "restarts_total", reason="hung") == 0
    assert value(series, "comm_bytes_total", local_rank="0", op="broadcast") == 0
    assert value(series, "checkpoint_failures_total", tier="memory") == 0
    assert value(series, "step_seconds_count", phase="optimizer") == 0
    assert not [key for key in series if key[0] == "elasticd_step"]


def test_counters_survive_worker_restarts_and_never_fall(node: Node) -> None:
    before = counters(node.scrape())
    for done in range(1, 4):
        node.start_round()
        for local_rank in range(2):
            train(node, local_rank, step=1)
        middle = counters(node.scrape())
        train(node, 0, step=2)  # after the last scrape: seen only when the round ends
        node.end_round()
        after = counters(node.scrape())
        assert before.keys() == middle.keys() == after.keys()
        assert all(middle[k] >= before[k] and after[k] >= middle[k] for k in before)
        assert value(after, "samples_total", local_rank="0") == 16 * done
        assert value(after, "samples_total", local_rank="1") == 8 * done
        assert value(after, "step_seconds_count", phase="data") == 3 * done
        assert value(after, "step_seconds_sum", phase="data") == pytest.approx(0.006 * done)
        before = after


def test_a_worker_that_counts_anew_in_the_same_block_does_not_make_a_counter_fall(node: Node) -> None:
    node.start_round()
    node.writers[0].update(samples_total=100)
    node.scrape()
    node.writers[0].update(samples_total=3)
    assert value(node.scrape(), "samples_total", local_rank="0") == 103


def test_a_dead_worker_leaves_no_series_of_now(node: Node) -> None:
    node.start_round()
    for local_rank in range(2):
        train(node, local_rank, step=7)
    assert value(node.scrape(), "step", local_rank="1") == 7
    node.alive.discard(1)
    series = node.scrape()
    for name in ("step", "memory_host_rss_bytes", "memory_tensor_bytes", "progress_age_seconds"):
        ranks = {dict(labels)["local_rank"] for found, labels in series if found == f"elasticd_{name}"}
        assert ranks == {"0"}, name
    assert value(series, "samples_total", local_rank="1") == 8


def test_the_same_world_has_the_same_series_after_any_churn(node: Node) -> None:
    seen = []
    for _ in range(5):
        node.start_round()
        for local_rank in range(2):
            train(node, local_rank, step=1)
        seen.append(node.scrape().keys())
        node.end_round()
    assert all(keys == seen[0] for keys in seen)


def test_a_commit_in_memory_needs_every_rank_and_one_to_disk_is_known_by_any(node: Node) -> None:
    name, seen = "checkpoint_last_commit_timestamp_seconds", []
    for times in ((100.0, 0.0), (150.0, 101.0), (201.0, 200.0)):
        node.start_round()
        for writer, time in zip(node.writers.values(), times, strict=True):
            writer.update(commit_unix_time=time, memory_unix_time=time)
        series = node.scrape()
        seen.append(series.get((f"elasticd_{name}", (("tier", "memory"),))))
        assert value(series, name, tier="disk") == max(times)
        node.end_round()
    assert seen == [None, 101.0, 200.0]


def test_a_damaged_block_costs_its_series_and_is_counted(node: Node) -> None:
    node.start_round()
    for local_rank in range(2):
        train(node, local_rank, step=7)
    before = node.scrape()
    path = node.folder / "progress-1-1"
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(128)
        file.write(b"\xff" * (len(whole) - 128))
    series = node.scrape()
    assert value(series, "step", local_rank="0") == 7
    assert ("elasticd_step", (("local_rank", "1"),)) not in series
    assert value(series, "scrape_errors_total") == value(before, "scrape_errors_total") + 1
    assert value(series, "samples_total", local_rank="1") == 8


def test_a_block_that_was_cut_off_costs_its_series_alone(node: Node) -> None:
    node.start_round()
    train(node, 0, step=7)
    os.truncate(node.folder / "progress-1-1", 0)
    series = node.scrape()
    assert value(series, "step", local_rank="0") == 7
    assert value(series, "scrape_errors_total") == 1


def test_a_worker_without_a_session_has_no_series_and_is_no_error(node: Node) -> None:
    node.start_round()
    for writer in node.writers.values():
        writer.update(pid=0)
    series = node.scrape()
    assert "elasticd_step" not in names(series)
    assert value(series, "scrape_errors_total") == 0


def test_an_agent_that_does_not_answer_costs_everything_but_the_scrape(node: Node) -> None:
    node.broken = TimeoutError("the loop is busy")
    assert value(node.scrape(), "scrape_errors_total") == 1
    assert value(node.scrape(), "scrape_errors_total") == 2
    node.broken = None
    assert value(node.scrape(), "scrape_errors_total") == 2


def test_unknown_memory_has_no_series_and_a_loss_that_is_no_number_is_shown(node: Node) -> None:
    node.start_round()
    train(node, 0, step=1)
    node.writers[0].update(loss=float("nan"))
    series = node.scrape()
    kinds = {dict(labels)["kind"] for name, labels in series if name == "elasticd_memory_tensor_bytes"}
    assert kinds == {"weights"}
    assert "elasticd_memory_device_bytes" not in names(series)
    assert math.isnan(value(series, "loss"))


def test_buckets_count_what_took_at_most_their_bound(node: Node) -> None:
    node.start_round()
    for seconds in (BOUNDS[0], BOUNDS[1], 1e6):
        node.writers[0].observe({"data": seconds})
    series = node.scrape()
    found = [
        value(series, "step_seconds_bucket", phase="data", le=le)
        for le in (str(BOUNDS[0]), str(BOUNDS[1]), str(BOUNDS[-1]), "+Inf")
    ]
    assert found == [1, 2, 2, 3]


def test_open_metrics_is_spoken_when_asked_for(node: Node) -> None:
    node.start_round()
    train(node, 0, step=1)
    body, kind = node.exposition.text("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in open_metrics(body.decode())}
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert families["elasticd_step_seconds"].unit == "seconds"
    assert families["elasticd_comm_bytes"].type == "counter"
    body, kind = node.exposition.text("text/plain")
    assert kind.startswith("text/plain")
    assert b"# HELP elasticd_goodput_ratio " in body


def test_a_recovery_is_told_with_its_round_where_openmetrics_is_asked_for(node: Node) -> None:
    seconds = IncidentSeconds(detect=0.1, stop=0.1, rendezvous=0.1, start=0.1, restore=0.1, first_step=0.1, total=0.6)
    incident = Incident(time=1700000000.0, cause="rank 0 killed", round=7, lost_steps=1, seconds=seconds)
    node.record.note(node.status(incidents=(incident,)), cause="", is_leader=True, now=1.0)
    body, _ = node.exposition.text("application/openmetrics-text; version=1.0.0")
    told = [s.exemplar for family in open_metrics(body.decode()) for s in family.samples if s.exemplar is not None]
    assert len(told) == 7, "one for each phase and one for the total"
    (total,) = [example for example in told if example.value == 0.6]
    assert total.labels == {"round": "7", "reason": "worker_failed"}
    assert float(total.timestamp) == 1700000000.0
    assert b"# {" not in node.exposition.text("")[0], "the text format has no word for it"


class Driver:
    """NVML as far as it is asked for critical errors: three GPUs, of which the last cannot tell of them."""

    class NVMLError(Exception):
        pass

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.events: list[SimpleNamespace] = []

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: str) -> None:
        if handle == "gpu2":
            raise self.NVMLError("not supported")

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"uuid of {handle}"

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:
        assert milliseconds == 0, "a scrape does not wait"
        if not self.events:
            raise self.NVMLError("timeout")
        return self.events.pop(0)


def test_critical_errors_of_a_gpu_are_counted_between_scrapes() -> None:
    driver = Driver()
    xids = Xids(driver, ["gpu0", "gpu1", "gpu2"])

    def scraped() -> dict[str, dict[tuple[str, ...], float]]:
        samples = Samples()
        xids.add_to(samples)
        return {name: dict(samples._samples[name]) for name in ("gpu_xid_errors_total", "gpu_last_xid")}  # type: ignore[arg-type]

    assert scraped() == {"gpu_xid_errors_total": {("0",): 0, ("1",): 0}, "gpu_last_xid": {}}
    driver.events = [SimpleNamespace(device="gpu1", eventData=code) for code in (31, 79)]
    told = {"gpu_xid_errors_total": {("0",): 0, ("1",): 2}, "gpu_last_xid": {("1",): 79}}
    assert scraped() == told
    assert scraped() == told
