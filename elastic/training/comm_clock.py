"""How long reductions take, and how much of that the backward pass could not hide.

Waiting is exposed from the end of the backward's own compute (an engine callback queued at the first bucket) to its
return. On CPU these are moments of the host. On CUDA the host runs ahead, so events are recorded in the same places
and read once they have passed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Protocol

import torch


class CommClock(Protocol):
    """`reduction_began` gives a token for `reduction_ended`, which any thread may call.

    `compute` is (seconds, micro-steps) from the beginning of a step to the end of its last backward's own compute.
    """

    def reduction_began(self) -> Any: ...
    def reduction_ended(self, token: Any) -> None: ...
    def step_began(self, micro_steps: int) -> None: ...
    def compute_ended(self) -> None: ...
    def backward_returned(self) -> None: ...
    def busy_seconds(self) -> float: ...
    def exposed_seconds(self) -> float: ...
    def compute(self) -> tuple[float, int]: ...


def make_clock(device: torch.device) -> CommClock:
    """The clock that tells the truth on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class HostClock:
    """For backends that are done when the host says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._busy_since = self._compute_end = 0.0
        self._busy = self._exposed = self._compute = 0.0
        self._step_began, self._micro_steps, self._computed = 0.0, 0, 0

    def reduction_began(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._busy_since = time.perf_counter()
            self._under_way += 1

    def reduction_ended(self, token: None) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._busy += time.perf_counter() - self._busy_since

    def step_began(self, micro_steps: int) -> None:
        self._step_began, self._micro_steps = time.perf_counter(), micro_steps

    def compute_ended(self) -> None:
        self._compute_end = time.perf_counter()
        self._compute += self._compute_end - self._step_began
        self._computed += self._micro_steps

    def backward_returned(self) -> None:
        if self._compute_end:
            self._exposed += time.perf_counter() - self._compute_end
            self._compute_end = 0.0

    def busy_seconds(self) -> float:
        return self._busy

    def exposed_seconds(self) -> float:
        return self._exposed

    def compute(self) -> tuple[float, int]:
        return self._compute, self._computed


class DeviceClock:
    """For CUDA: pairs of events on the stream that is current where they are recorded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: deque[tuple[str, Any, Any, int]] = deque()
        self._step_began: Any = None
        self._micro_steps = self._computed = 0
        self._compute_end: Any = None
        self._seconds = {"busy": 0.0, "exposed": 0.0, "compute": 0.0}

    @staticmethod
    def _event() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        return event

    def reduction_began(self) -> Any:
        return self._event()

    def reduction_ended(self, token: Any) -> None:
        with self._lock:
            self._pairs.append(("busy", token, self._event(), 0))

    def step_began(self, micro_steps: int) -> None:
        self._step_began, self._micro_steps = self._event(), micro_steps

    def compute_ended(self) -> None:
        self._compute_end = self._event()
        with self._lock:
            self._pairs.append(("compute", self._step_began, self._compute_end, self._micro_steps))

    def backward_returned(self) -> None:
        if self._compute_end is not None:
            with self._lock:
                self._pairs.append(("exposed", self._compute_end, self._event(), 0))
            self._compute_end = None

    def _collect(self) -> None:
        """Add up the pairs that have passed; the rest waits for the next reading, nothing blocks."""
        with self._lock:
            while self._pairs and self._pairs[0][2].query():
                kind, begin, end, micro_steps = self._pairs.popleft()
                self._computed += micro_steps
                self._seconds[kind] += begin.elapsed_time(end) / 1000.0

    def busy_seconds(self) -> float:
        self._collect()
        return self._seconds["busy"]

    def exposed_seconds(self) -> float:
        self._collect()
        return self._seconds["exposed"]

    def compute(self) -> tuple[float, int]:
        self._collect()
        return self._seconds["compute"], self._computed
