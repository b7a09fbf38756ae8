"""A job as the collector sees it: real progress blocks, written by real writers, and a status made by hand."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from elastic import progress
from elastic.metrics.exposition import Exposition
from elastic.metrics.job_record import JobRecord
from elastic.metrics.measured import TIME_KINDS, Measured, StoreTotals, WorkerReport
from elastic.metrics.totals import Totals
from elastic.status import CheckpointStatus, JobStatus, RestartStatus, WorkerStatus
from elastic.timings import NO_TIMINGS

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Node:
    """What the agent does for its metrics, without an agent: blocks, rounds, and one `Measured` after another."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.folder = folder
        self.count = workers
        self.totals = Totals(workers)
        self.record = JobRecord(time.monotonic())
        self.round = 0
        self.writers: dict[int, progress.ProgressWriter] = {}
        self.readers: dict[int, progress.ProgressReader] = {}
        self.alive: set[int] = set()
        self.lock = threading.RLock()  # as the agent's loop keeps its scrapes and its rounds apart
        self.broken: Exception | None = None
        self.exposition = Exposition(self.measure)

    def start_round(self) -> None:
        """New workers on new blocks."""
        with self.lock:
            self._start_round()

    def _start_round(self) -> None:
        self.round += 1
        for local_rank in range(self.count):
            path = self.folder / f"progress-{self.round}-{local_rank}"
            progress.create(path)
            self.readers[local_rank] = progress.ProgressReader(path)
            self.writers[local_rank] = writer = progress.ProgressWriter(path)
            writer.update(pid=os.getpid(), round=self.round, rank=local_rank, local_rank=local_rank, world_size=2)
            self.alive.add(local_rank)

    def end_round(self) -> None:
        """All workers are gone: their last reports are taken over, then forgotten."""
        with self.lock:
            self._end_round()

    def _end_round(self) -> None:
        self.alive.clear()
        self.totals.take(self.reports())
        for local_rank in list(self.readers):
            self.writers.pop(local_rank).close()
            self.readers.pop(local_rank).close()

    def reports(self) -> tuple[WorkerReport, ...]:
        return tuple(
            WorkerReport(
                local_rank=local_rank,
                pid=os.getpid(),
                is_alive=local_rank in self.alive,
                progress=reader.read() or progress.Progress(),
                timings=reader.read_timings() or NO_TIMINGS,
                is_damaged=reader.is_damaged,
            )
            for local_rank, reader in self.readers.items()
        )

    def status(self, **changes: Any) -> JobStatus:
        workers = tuple(
            WorkerStatus(local_rank=n, rank=n, pid=1, state="running", step=1, age_seconds=0.1)
            for n in sorted(self.alive)
        )
        fields: dict[str, Any] = {
            "run_id": "train",
            "incarnation": "a",
            "node_id": "n1",
            "state": "running" if self.alive else "stopped",
            "round": self.round,
            "world_size": self.count,
            "workers": workers,
            "checkpoint": CheckpointStatus(disk_step=3, memory_step=4),
            "restarts": RestartStatus(used=1, limit=3, window_seconds=600),
        }
        return JobStatus(**(fields | changes))

    def measure(self) -> Measured:
        if self.broken is not None:
            raise self.broken
        with self.lock:
            return self._measure()

    def _measure(self) -> Measured:
        reports = self.reports()
        self.totals.take(reports)
        return Measured(
            status=self.status(),
            is_leader=True,
            workers=reports,
            totals=self.totals.all(),
            job=self.record.totals(),
            store=StoreTotals(),
            goodput=0.9,
            seconds=dict.fromkeys(TIME_KINDS, 1.0),
            commit_times=dict(self.totals.commit_times),
            block_errors=self.totals.damaged,
        )

    def scrape(self) -> Series:
        body, _ = self.exposition.text("")
        return series_of(body.decode())


def series_of(text: str) -> Series:
    """Every series of an exposition by name and labels. Fails on one that is there twice."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    return series[(f"elasticd_{name}", tuple(sorted(labels.items())))]


def names(series: Series) -> set[str]:
    return {name for name, _ in series}
