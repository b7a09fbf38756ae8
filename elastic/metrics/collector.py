"""The collector: turns what was measured at the moment of a scrape into metrics. It keeps no state but its errors.

What a worker counts is there for every local rank at any time; what it shows of now is there while it lives. A part
that cannot be had costs its series and one of `scrape_errors_total`, never the scrape.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from elastic.metrics import host
from elastic.metrics.catalogue import Samples, Shown
from elastic.metrics.measured import REASONS, RECOVERY_PHASES, TIME_KINDS, Measured, WorkerReport
from elastic.status import JobState
from elastic.timings import STEP_PHASES, WORKER_TIMINGS, Histogram

logger = logging.getLogger(__name__)

_STATES: tuple[JobState, ...] = (
    "joining",
    "waiting",
    "spare",
    "starting",
    "running",
    "draining",
    "stopped",
    "closed",
)
# Counters with the label of the local rank: metric, field of the progress block, further label.
_COUNTED = (
    ("samples_total", "samples_total", ()),
    ("tokens_total", "tokens_total", ()),
    ("comm_bytes_total", "comm_bytes_total", ("all_reduce",)),
    ("comm_bytes_total", "broadcast_bytes_total", ("broadcast",)),
    ("comm_seconds_total", "comm_seconds_total", ("all_reduce",)),
    ("comm_seconds_total", "broadcast_seconds_total", ("broadcast",)),
    ("comm_exposed_seconds_total", "comm_exposed_seconds_total", ()),
    ("grad_syncs_total", "grad_syncs_total", ()),
    ("grad_syncs_skipped_total", "grad_syncs_skipped_total", ()),
    ("memory_alloc_retries_total", "alloc_retries_total", ()),
    ("memory_ooms_total", "ooms_total", ()),
)
# Of the node or the job: added up over the local ranks.
_SUMMED = (
    ("skipped_steps_total", "skipped_steps_total", ()),
    ("checkpoint_bytes_total", "checkpoint_bytes_total", ("disk",)),
    ("checkpoint_bytes_total", "memory_bytes_total", ("memory",)),
    ("checkpoint_failures_total", "checkpoint_failures_total", ("disk",)),
    ("checkpoint_failures_total", "memory_failures_total", ("memory",)),
)
# Gauges of a live worker that are left out while they are negative: not known.
_BYTES = (
    ("memory_tensor_bytes", "weights_bytes", ("weights",)),
    ("memory_tensor_bytes", "gradients_bytes", ("gradients",)),
    ("memory_tensor_bytes", "optimizer_bytes", ("optimizer",)),
    ("memory_tensor_bytes", "activations_bytes", ("activations",)),
    ("memory_device_bytes", "device_allocated_bytes", ("allocated",)),
    ("memory_device_bytes", "device_reserved_bytes", ("reserved",)),
    ("memory_device_peak_bytes", "device_peak_bytes", ()),
)

Part = Callable[[Samples], None]


class AgentCollector(Collector):
    """`measure` may raise; `extra` are further parts that add samples of their own. Called by any thread."""

    def __init__(
        self, measure: Callable[[], Measured], *, versions: dict[str, str], extra: Sequence[Part] = ()
    ) -> None:
        self._measure, self._versions, self._extra = measure, versions, extra
        self._errors = 0

    def describe(self) -> Iterable[Metric]:
        return Samples().metrics()

    def collect(self) -> Iterable[Metric]:
        samples, damaged = Samples(), 0
        samples.add("build_info", self._versions)
        try:
            measured = self._measure()
        except Exception as exc:  # noqa: BLE001 - the top of a scrape: what can be told is told all the same
            self._fail("the agent", exc)
        else:
            damaged = measured.block_errors
            parts: list[tuple[str, Part]] = [(part.__name__, _bound(part, measured)) for part in _PARTS]
            parts += [
                (f"local rank {worker.local_rank}", _bound_worker(worker))
                for worker in measured.workers
                if worker.has_series
            ]
            for name, part in parts:
                self._try(name, part, samples)
        for number, part in enumerate(self._extra):
            self._try(f"extra part {number}", part, samples)
        samples.add("scrape_errors_total", self._errors + damaged)
        return samples.metrics()

    def _try(self, name: str, part: Part, samples: Samples) -> None:
        """All samples of a part, or none."""
        made = Samples()
        try:
            part(made)
        except Exception as exc:  # noqa: BLE001 - the top of a part
            self._fail(name, exc)
        else:
            samples.take(made)

    def _fail(self, name: str, error: Exception) -> None:
        self._errors += 1
        logger.warning("a scrape went without %s: %s: %s", name, type(error).__name__, error)


def _bound(part: Callable[[Measured, Samples], None], measured: Measured) -> Part:
    return lambda samples: part(measured, samples)


def _bound_worker(worker: WorkerReport) -> Part:
    return lambda samples: _worker(worker, samples)


def _job(measured: Measured, samples: Samples) -> None:
    status, job = measured.status, measured.job
    samples.add("job_info", {"run_id": status.run_id, "node_id": status.node_id})
    samples.add("round", status.round)
    samples.add("world_size", status.world_size)
    samples.add("nodes", len(status.nodes), "member")
    samples.add("nodes", len(status.waiting), "waiting")
    for state in _STATES:
        samples.add("agent_state", int(state == status.state), state)
    samples.add("restarts_remaining", max(0, (status.restarts.limit or 0) - status.restarts.used))
    for reason in REASONS:
        samples.add("restarts_total", job.restarts[reason], reason)
    samples.add("lost_steps_total", job.lost_steps)
    for phase in RECOVERY_PHASES:
        samples.add("recovery_seconds", Shown(job.recovery[phase], job.newest.get(phase)), phase)
    samples.add("rendezvous_seconds", job.rendezvous)
    samples.add("lease_renew_seconds", measured.store.lease_renewals)
    samples.add("store_errors_total", measured.store.errors)
    if not math.isnan(measured.goodput):
        samples.add("goodput_ratio", measured.goodput)
    for kind in TIME_KINDS:
        samples.add("time_seconds_total", measured.seconds[kind], kind)
    for worker in status.workers:
        if worker.age_seconds is not None and worker.state in ("starting", "running", "draining"):
            samples.add("progress_age_seconds", worker.age_seconds, str(worker.local_rank))


def _counters(measured: Measured, samples: Samples) -> None:
    for local_rank, totals in measured.totals.items():
        for name, field, labels in _COUNTED:
            samples.add(name, totals.counters[field], str(local_rank), *labels)
    for name, field, labels in _SUMMED:
        samples.add(name, sum(totals.counters[field] for totals in measured.totals.values()), *labels)
    timings = {name: _added(measured, name) for name in WORKER_TIMINGS}
    for phase in STEP_PHASES:
        samples.add("step_seconds", timings[phase], phase)
    samples.add("checkpoint_stall_seconds", timings["checkpoint_stall"])
    samples.add("checkpoint_write_seconds", timings["checkpoint_write"])


def _added(measured: Measured, name: str) -> Histogram:
    """Of all local ranks: a histogram for each would be most of a scrape."""
    return sum((totals.timings[name] for totals in measured.totals.values()), start=Histogram())


def _checkpoints(measured: Measured, samples: Samples) -> None:
    safe = measured.status.checkpoint
    for tier, step, commit_time in (
        ("disk", safe.disk_step, measured.commit_times["disk"]),
        ("memory", safe.memory_step, measured.commit_times["memory"]),
    ):
        if step is not None:
            samples.add("checkpoint_committed_step", step, tier)
        if commit_time:
            samples.add("checkpoint_last_commit_timestamp_seconds", commit_time, tier)


def _batch(measured: Measured, samples: Samples) -> None:
    """What is the same on every rank is told by one."""
    for worker in measured.workers:
        if worker.has_series and worker.progress.first_step_at:
            samples.add("loss", worker.progress.loss)
            samples.add("learning_rate", worker.progress.learning_rate)
            samples.add("grad_norm", worker.progress.grad_norm)
            return


def _host(measured: Measured, samples: Samples) -> None:
    samples.add("memory_host_limit_bytes", host.memory_limit_bytes())
    samples.add("memory_host_used_bytes", host.memory_used_bytes())
    for worker in measured.workers:
        rss = host.rss_bytes(worker.pid) if worker.is_alive else None
        if rss is not None:
            samples.add("memory_host_rss_bytes", rss, str(worker.local_rank))


_PARTS = (_job, _counters, _checkpoints, _batch, _host)


def _worker(worker: WorkerReport, samples: Samples) -> None:
    report, local_rank = worker.progress, str(worker.local_rank)
    if report.step >= 0:
        samples.add("step", report.step, local_rank)
    if report.slowdown:
        samples.add("slowdown_ratio", report.slowdown, local_rank)
    if not math.isnan(report.bus_bandwidth):
        samples.add("comm_bus_bandwidth_bytes_per_second", report.bus_bandwidth, local_rank)
    for name, field, labels in _BYTES:
        value: int = getattr(report, field)
        if value >= 0:
            samples.add(name, value, local_rank, *labels)
