"""Autocast, loss scaling, and what happens to the gradient between the last backward and the optimizer."""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elastic.training.stopwatch import Stopwatch
from elastic.training.trainer_config import Precision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Of one update: the gradient's norm before clipping, and whether the optimizer was run."""

    grad_norm: float
    applied: bool


class Stepper:
    """Turns the summed gradient of `sum of losses / nominal weight` into one update."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, precision: Precision, clip_norm: float | None, device: torch.device
    ) -> None:
        self._optimizer, self._clip_norm, self._device = optimizer, clip_norm, device
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._watch = Stopwatch(device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def scaled(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """What is back-propagated; `factor` is a power of two, so nothing is rounded."""
        loss = loss * factor
        return loss if self._scaler is None else self._scaler.scale(loss)

    def update(self, gradients: list[torch.Tensor], factor: float) -> UpdateResult:
        """Multiply the gradient by `factor`, clip it and run the optimizer, unless the gradient is not finite.

        Every rank holds the same gradient, so all decide alike. Non-finite under a scaler: the scale is halved.
        """
        with self._watch.measured():
            return self._update(gradients, factor)

    def seconds(self) -> float:
        """Of all updates so far; on CUDA of those that have passed."""
        return self._watch.seconds()

    def _update(self, gradients: list[torch.Tensor], factor: float) -> UpdateResult:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
        applied = math.isfinite(norm)
        if applied:
            if self._clip_norm is not None and norm > self._clip_norm:
                factor *= self._clip_norm / norm
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self._optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        return UpdateResult(grad_norm=norm, applied=applied)

    def state(self) -> dict[str, Any] | None:
        """The scaler's state; None without one."""
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state(self, state: dict[str, Any] | None) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)

    @property
    def has_scaler(self) -> bool:
        return self._scaler is not None


def power_of_two_near(value: float) -> float:
    """The power of two nearest to `value` on a logarithmic scale; 1 for what is not a positive number."""
    if not (value > 0 and math.isfinite(value)):
        return 1.0
    return float(2.0 ** round(math.log2(value)))
