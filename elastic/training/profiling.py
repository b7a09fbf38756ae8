"""torch.profiler over some steps of a running round, when the agent asks for it.

All ranks that were asked begin after the same step: each says in the step's exchange that it has seen the order, and
when all have, the next report of a step is the first boundary. Until then nothing is measured, and nothing costs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from elastic import profile_order
from elastic.profile_order import PARTS, ProfileOrder, ProfileSummary
from elastic.progress import ProgressWriter

logger = logging.getLogger(__name__)

_PART_OF = {  # a phase of a step -> its part in the summary; what has none is idle
    "forward_backward": "compute",
    "comm_exposed": "exposed_communication",
    "data": "data",
    "optimizer": "optimizer",
}
_SILENT = "6"  # else the profiler's library tells stderr that it begins and ends
Pause = Callable[[], AbstractContextManager[None]]


@dataclasses.dataclass(slots=True)
class _Running:
    """The profile that is being taken."""

    order: ProfileOrder
    profiler: Any
    before: int  # the step after which it began
    began: float
    mark: Any = None  # of the step that runs, as the tools that read such traces expect it
    spent: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class Profiling:
    """One rank's part. Called by the training thread."""

    def __init__(self, progress: ProgressWriter, *, rank: int, pause: Pause) -> None:
        """`pause` is entered where training stands still, so that it is no hang."""
        self._progress, self._rank, self._pause = progress, rank, pause
        self._seen = 0
        self._order: ProfileOrder | None = None
        self._is_due = False
        self._running: _Running | None = None

    @property
    def is_wanted(self) -> bool:
        """What this rank says in the exchange: there is an order that it has not begun with."""
        if self._progress.profiles_requested != self._seen and self._running is None:
            self._seen = self._progress.profiles_requested
            self._order = self._read()
        return self._order is not None and not self._is_due and self._running is None

    def agreed(self, ready: int) -> None:
        """After each exchange: so many ranks have said that they want to begin."""
        self._is_due = self._is_due or (self._order is not None and ready >= self._order.asked)

    @property
    def is_active(self) -> bool:
        """Whether `stepped` has anything to do."""
        return self._is_due or self._running is not None

    def stepped(self, step: int, spent: Mapping[str, float]) -> None:
        """A step is over, and where its time went."""
        if self._running is None:
            self._begin(step)
            return
        running = self._running
        for phase, seconds in spent.items():
            if phase in _PART_OF:
                running.spent[_PART_OF[phase]] += seconds
        running.mark.__exit__(None, None, None)
        if step - running.before < running.order.steps:
            self._mark(step + 1)
        else:
            self._end(running, step)

    def close(self) -> None:
        """Training is over before the steps were: what there is counts for nothing."""
        if self._running is not None:
            self._running.profiler.stop()
            self._running = None

    def _read(self) -> ProfileOrder | None:
        path = profile_order.beside(self._progress.path)
        try:
            return ProfileOrder.from_json(json.loads(path.read_text()))
        except (OSError, ValueError) as exc:
            logger.warning("rank=%s cannot read what is to be profiled: %s", self._rank, exc)
            return None

    def _begin(self, step: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        order, self._order, self._is_due = self._order, None, False
        if order is None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        with self._pause():
            profiler = profile(activities=activities)
            profiler.start()
        logger.info("rank=%s step=%s profiling the next %s steps", self._rank, step, order.steps)
        self._running = _Running(order=order, profiler=profiler, before=step, began=time.perf_counter())
        self._mark(step + 1)

    def _mark(self, step: int) -> None:
        from torch.profiler import record_function

        assert self._running is not None
        self._running.mark = record_function(f"ProfilerStep#{step}")
        self._running.mark.__enter__()

    def _end(self, running: _Running, step: int) -> None:
        wall = time.perf_counter() - running.began
        self._running = None
        with self._pause():
            running.profiler.stop()
            try:
                running.profiler.export_chrome_trace(str(running.order.trace(self._rank)))
                profile_order.write(running.order.summary(self._rank), self._summary(running, step, wall).to_json())
            except (OSError, RuntimeError) as exc:  # RuntimeError: how torch says that it cannot write
                logger.error("rank=%s step=%s the profile cannot be written: %s", self._rank, step, exc)
                return
        logger.info("rank=%s step=%s profile written to %s", self._rank, step, running.order.trace(self._rank))

    def _summary(self, running: _Running, step: int, wall: float) -> ProfileSummary:
        steps = step - running.before
        seconds = {part: running.spent[part] / steps for part in PARTS}
        seconds["idle"] = max(0.0, wall / steps - sum(seconds.values()))
        has_phases = any(running.spent.values())
        return ProfileSummary(
            rank=self._rank,
            first_step=running.before + 1,
            last_step=step,
            step_seconds=sum(seconds.values()),
            seconds=seconds if has_phases else {},
            trace=str(running.order.trace(self._rank)),
        )
