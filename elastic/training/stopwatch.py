"""How long pieces of work take that are begun by the training thread: by the host's clock, on CUDA by events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the seconds of what runs inside `measured`. Nothing waits for a device: the newest may be missing."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._seconds = 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around one piece; of one that raises nothing is counted."""
        began = _event() if self._on_device else time.perf_counter()
        yield
        if self._on_device:
            self._pairs.append((began, _event()))
        else:
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Of all pieces that have passed."""
        while self._pairs and self._pairs[0][1].query():
            began, ended = self._pairs.popleft()
            self._seconds += began.elapsed_time(ended) / 1000.0
        return self._seconds


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
    event.record()
    return event
