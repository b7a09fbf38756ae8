"""Every metric that an agent exports, as data: its name, kind, unit, labels and what it says. The only place for these.

Labels are few and bounded. What has `local_rank` is the worker's own; what has not is the agent's, or the whole job's
and then counted by the job's leader alone, so that sum() over agents is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from elastic.metrics.measured import Example
from elastic.timings import BOUNDS, Histogram, bucket_of

PREFIX = "elasticd_"
_BOUNDS = [*map(str, BOUNDS), "+Inf"]


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A histogram with an example of what is in it, which only OpenMetrics tells."""

    histogram: Histogram
    example: Example | None = None

    def buckets(self) -> list[Any]:
        """(bound, count), and in the bucket of the example that as well."""
        made: list[Any] = [list(pair) for pair in zip(_BOUNDS, self.histogram.cumulative(), strict=True)]
        if self.example is not None:
            told = Exemplar(dict(self.example.labels), self.example.seconds, self.example.unix_time)
            made[bucket_of(self.example.seconds)].append(told)
        return made


Value = float | dict[str, str] | Histogram | Shown


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """`name` as in the exposition, less the prefix: counters end in _total, infos in _info."""

    kind: str  # counter, gauge, histogram, info
    name: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    def metric(self, samples: Sequence[tuple[Sequence[str], Value]]) -> Metric:
        """With samples, each of them the labels' values and the value itself."""
        name = PREFIX + self.name
        if self.kind == "counter":
            counter = CounterMetricFamily(name, self.help, labels=self.labels, unit=self.unit)
            for labels, value in samples:
                counter.add_metric(labels, value)  # type: ignore[arg-type]  # by kind
            return counter
        if self.kind == "gauge":
            gauge = GaugeMetricFamily(name, self.help, labels=self.labels, unit=self.unit)
            for labels, value in samples:
                gauge.add_metric(labels, value)  # type: ignore[arg-type]  # by kind
            return gauge
        if self.kind == "info":
            info = InfoMetricFamily(name.removesuffix("_info"), self.help)
            for _, value in samples:
                info.add_metric((), value)  # type: ignore[arg-type]  # by kind
            return info
        family = HistogramMetricFamily(name, self.help, labels=self.labels, unit=self.unit)
        for labels, value in samples:
            shown = value if isinstance(value, Shown) else Shown(value)  # type: ignore[arg-type]  # by kind
            family.add_metric(labels, shown.buckets(), shown.histogram.sum)
        return family


_JOB = (
    Family("info", "job_info", "The job and the node that this agent belongs to.", ("run_id", "node_id")),
    Family("info", "build_info", "Versions of elasticd and torch.", ("version", "torch")),
    Family("gauge", "round", "Number of the current round; 0 before the first one."),
    Family("gauge", "world_size", "Ranks of the current round."),
    Family("gauge", "nodes", "Nodes of the job by what they do; only the leader knows all that wait.", ("state",)),
    Family("gauge", "agent_state", "1 for the state that this agent is in, 0 for all others.", ("state",)),
    Family("counter", "restarts_total", "Rounds that followed another one, by what ended that.", ("reason",)),
    Family("gauge", "restarts_remaining", "Failures that the job may still have within --restart-window."),
    Family("counter", "lost_steps_total", "Steps that had to be run again after a recovery."),
    Family(
        "gauge", "goodput_ratio", "Share of wall time since the job began spent in steps that counted.", (), "ratio"
    ),
    Family("counter", "time_seconds_total", "Wall time of this agent by what it went into.", ("kind",), "seconds"),
    Family("histogram", "rendezvous_seconds", "From having no workers to the next round's start.", (), "seconds"),
    Family("histogram", "recovery_seconds", "Parts of a recovery, and its total.", ("phase",), "seconds"),
    Family("histogram", "lease_renew_seconds", "Answered renewals of this node's lease.", (), "seconds"),
    Family("counter", "store_errors_total", "Calls to the store that had no answer."),
    Family("counter", "scrape_errors_total", "Damaged progress blocks and other parts that a scrape went without."),
)
_TRAINING = (
    Family("gauge", "step", "Last optimizer step that was applied.", ("local_rank",)),
    Family(
        "counter", "samples_total", "Samples that this rank has trained on, repeated ones included.", ("local_rank",)
    ),
    Family("counter", "tokens_total", "Tokens that this rank has trained on, as the task counts.", ("local_rank",)),
    Family("histogram", "step_seconds", "Disjoint parts of a step, of every local rank.", ("phase",), "seconds"),
    Family("gauge", "loss", "Mean loss of the last step, of the whole batch."),
    Family("gauge", "learning_rate", "Learning rate of the last step."),
    Family("gauge", "grad_norm", "Norm of the last step's gradient before clipping."),
    Family("counter", "skipped_steps_total", "Steps without an update: loss scaling, or nonfinite='skip'."),
    Family(
        "gauge", "progress_age_seconds", "Time since the worker's last sign of progress.", ("local_rank",), "seconds"
    ),
    Family("gauge", "slowdown_ratio", "Time for a micro-batch over the median of all ranks.", ("local_rank",), "ratio"),
)
_COMMS = (
    Family("counter", "comm_bytes_total", "Bytes handed to collectives.", ("local_rank", "op"), "bytes"),
    Family("counter", "comm_seconds_total", "Time with a collective under way.", ("local_rank", "op"), "seconds"),
    Family(
        "counter", "comm_exposed_seconds_total", "Reductions that no compute could hide.", ("local_rank",), "seconds"
    ),
    Family(
        "gauge",
        "comm_bus_bandwidth_bytes_per_second",
        "Bus bandwidth of the newest gradient reductions, as nccl-tests counts it.",
        ("local_rank",),
        "bytes_per_second",
    ),
    Family("counter", "grad_syncs_total", "Backward passes that synchronised gradients.", ("local_rank",)),
    Family("counter", "grad_syncs_skipped_total", "Synchronisations that accumulation has saved.", ("local_rank",)),
)
_MEMORY = (
    Family("gauge", "memory_tensor_bytes", "Memory of tensors by what they hold.", ("local_rank", "kind"), "bytes"),
    Family("gauge", "memory_device_bytes", "The device allocator's memory.", ("local_rank", "kind"), "bytes"),
    Family("gauge", "memory_device_peak_bytes", "Most that was allocated on the device.", ("local_rank",), "bytes"),
    Family("gauge", "memory_host_rss_bytes", "Resident memory of the worker process.", ("local_rank",), "bytes"),
    Family("gauge", "memory_host_limit_bytes", "What this host, or its control group, has.", (), "bytes"),
    Family("gauge", "memory_host_used_bytes", "What is in use of that, caches not counted.", (), "bytes"),
    Family("gauge", "memory_shared_bytes", "Shared memory that this agent and its workers hold.", (), "bytes"),
    Family("counter", "memory_alloc_retries_total", "Device allocations tried again.", ("local_rank",)),
    Family("counter", "memory_ooms_total", "Device allocations that failed.", ("local_rank",)),
)
_GPU = (
    Family("gauge", "gpu_memory_used_bytes", "Memory in use on the GPU, whoever uses it.", ("device",), "bytes"),
    Family("gauge", "gpu_memory_limit_bytes", "Memory of the GPU.", ("device",), "bytes"),
    Family("gauge", "gpu_utilization_ratio", "Share of time with a kernel running.", ("device",), "ratio"),
    Family("gauge", "gpu_temperature_celsius", "Temperature of the GPU.", ("device",), "celsius"),
    Family("gauge", "gpu_power_watts", "Power drawn.", ("device",), "watts"),
    Family("counter", "gpu_xid_errors_total", "Critical errors (XID) that the driver has told of.", ("device",)),
    Family("gauge", "gpu_last_xid", "Code of the newest of them; there is none before the first.", ("device",)),
    Family("gauge", "gpu_ecc_errors", "Uncorrected memory errors since the driver was loaded.", ("device",)),
)
_CHECKPOINTS = (
    Family("histogram", "checkpoint_stall_seconds", "How long training stood still for a save.", (), "seconds"),
    Family("histogram", "checkpoint_write_seconds", "From the save's copy to its commit.", (), "seconds"),
    Family("counter", "checkpoint_bytes_total", "Bytes written by this node's ranks.", ("tier",), "bytes"),
    Family("gauge", "checkpoint_committed_step", "Newest step that is safe.", ("tier",)),
    Family(
        "gauge", "checkpoint_last_commit_timestamp_seconds", "Unix time of the newest commit.", ("tier",), "seconds"
    ),
    Family("counter", "checkpoint_failures_total", "Saves that were not committed.", ("tier",)),
)
FAMILIES = {family.name: family for group in (_JOB, _TRAINING, _COMMS, _MEMORY, _GPU, _CHECKPOINTS) for family in group}


class Samples:
    """Samples by family, on their way into an exposition."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[Sequence[str], Value]]] = {name: [] for name in FAMILIES}

    def add(self, name: str, value: Value, *labels: str) -> None:
        """One sample; `labels` are the values in the family's order. Raises: KeyError for a name that is none."""
        self._samples[name].append((labels, value))

    def take(self, other: Samples) -> None:
        """All that another one holds."""
        for name, samples in other._samples.items():
            self._samples[name] += samples

    def metrics(self) -> list[Metric]:
        """Every family, those without a sample as well."""
        return [family.metric(self._samples[name]) for name, family in FAMILIES.items()]
