"""What a rank's memory holds: weights, gradients and optimizer state by their tensors, the rest by the allocator.

Activations are known where an allocator counts: the peak since training began above those three. Without a device there
is none that could be asked at no cost, and a resident set says nothing of a step's peak: then they stay unknown.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_LOOK_SECONDS = 1.0  # between two looks, from the second step on


class MemoryMeter:
    """One per round. Gradients count while they are there, so look between the update and the next step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._optimizer, self._device, self._now = model, optimizer, device, now
        self._looks = 0
        self._due = 0.0
        self._before = self._events()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def fields(self) -> dict[str, float]:
        """Fields of the progress block; empty while no look is due. The first two steps are always looked at."""
        now = self._now()
        if self._looks > 1 and now < self._due:
            return {}
        self._looks, self._due = self._looks + 1, now + _LOOK_SECONDS
        weights = _bytes(itertools.chain(self._model.parameters(), self._model.buffers()))
        gradients = _bytes(p.grad for p in self._model.parameters() if p.grad is not None)
        optimizer = _bytes(_tensors(list(self._optimizer.state.values())))
        fields: dict[str, float] = {
            "weights_bytes": weights,
            "gradients_bytes": gradients,
            "optimizer_bytes": optimizer,
        }
        if self._device.type == "cuda":
            fields.update(self._of_device(weights + gradients + optimizer))
        return fields

    def _of_device(self, known: int) -> dict[str, float]:
        stats: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
        peak = stats["allocated_bytes"]["all"]["peak"]
        retries, ooms = (max(0, now - then) for now, then in zip(self._events(), self._before, strict=True))
        return {
            "activations_bytes": max(0, peak - known),
            "device_allocated_bytes": stats["allocated_bytes"]["all"]["current"],
            "device_reserved_bytes": stats["reserved_bytes"]["all"]["current"],
            "device_peak_bytes": peak,
            "alloc_retries_total": retries,
            "ooms_total": ooms,
        }

    def _events(self) -> tuple[int, int]:
        """Allocations that had to be tried again, and that failed, in this process so far."""
        if self._device.type != "cuda":
            return (0, 0)
        stats: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
        return (stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each counted once: tied weights and views share one."""
    seen = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(seen.values())


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """All tensors anywhere in dicts and lists; a custom optimizer may nest."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
