"""Number of applied updates -> learning rate. Never the world size, never the clock."""

from __future__ import annotations

import math

import torch

from elastic.training.task import Task
from elastic.training.trainer_config import TrainerConfig


def rate_factor(config: TrainerConfig, update: int, total_updates: int) -> float:
    """Factor for update number `update` (from 0): warm-up, then constant, or down to `final_lr_ratio` at the end.

    Updates are steps that were applied: a skipped step (fp16 overflow) does not move the schedule.
    """
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * left


def batch_factor(config: TrainerConfig) -> float:
    """What `lr_scaling` makes of the global batch: the optimizer's rate is meant for `reference_batch_size` items."""
    if config.lr_scaling == "none" or config.reference_batch_size is None:
        return 1.0
    ratio = config.global_batch_size / config.reference_batch_size
    return ratio if config.lr_scaling == "linear" else math.sqrt(ratio)


class LearningRate:
    """Sets the rates of an optimizer's groups; what they are when this is made is what the factors apply to."""

    def __init__(self, task: Task, config: TrainerConfig, optimizer: torch.optim.Optimizer, total_updates: int) -> None:
        self._task, self._config, self._optimizer, self._total = task, config, optimizer, total_updates
        self._base = [float(group["lr"]) * batch_factor(config) for group in optimizer.param_groups]

    def set(self, update: int) -> float:
        """Set the rates for update `update` (from 0); returns the first group's."""
        factor = self._task.rate_factor(update)
        if factor is None:
            factor = rate_factor(self._config, update, self._total)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        return self._base[0] * factor
