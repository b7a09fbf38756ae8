"""Where training stands, and how that goes into a checkpoint and comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic.errors import DatasetChangedError
from elastic.training.batching import Position
from elastic.training.precision import Stepper
from elastic.training.state import check_optimizer_state, load_model_state, load_optimizer_state, optimizer_state
from elastic.training.task import Task
from elastic.training.trainer_config import TrainerConfig


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """Counts since the first step ever, over all rounds."""

    step: int = 0  # global batches consumed
    skipped: int = 0  # of those, without an update
    tokens: int = 0
    nominal_weight: float = 0.0  # the power of two by which losses are divided; 0 = not known yet
    position: Position = dataclasses.field(default_factory=Position)

    @property
    def updates(self) -> int:
        """What the schedule follows."""
        return self.step - self.skipped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """The live objects whose state is kept."""

    task: Task
    config: TrainerConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    stepper: Stepper


def capture(trainee: Trainee, at: Counters) -> dict[str, Any]:
    """Everything a resume needs, as nested data whose tensors are the live ones."""
    return {
        "model": dict(trainee.model.state_dict()),
        "optimizer": optimizer_state(trainee.model, trainee.optimizer),
        "trainer": {
            "step": at.step,
            "skipped": at.skipped,
            "tokens": at.tokens,
            "nominal_weight": at.nominal_weight,
            "position": dataclasses.asdict(at.position),
            "scaler": trainee.stepper.state(),
            "seed": trainee.config.seed,
            "shuffle": trainee.config.shuffle,
        },
        "task": dict(trainee.task.state_dict()),
    }


def put_back(trainee: Trainee, state: Mapping[str, Any]) -> Counters:
    """Load what `capture` gave. Everything is compared first; the model's tensors have been by the restore.

    Raises:
        DatasetChangedError: the items would come in another order than the position counts in.
        JobFailedError: the optimizer has other parameters.
    """
    kept, config = state["trainer"], trainee.config
    if (kept["seed"], kept["shuffle"]) != (config.seed, config.shuffle):
        raise DatasetChangedError(
            f"the checkpoint was made with seed {kept['seed']} and shuffle={kept['shuffle']}, this run has seed "
            f"{config.seed} and shuffle={config.shuffle}: items would be lost and repeated; use the same, or "
            "start in a new checkpoint directory"
        )
    check_optimizer_state(trainee.model, trainee.optimizer, state["optimizer"])
    load_model_state(trainee.model, state["model"])
    load_optimizer_state(trainee.model, trainee.optimizer, state["optimizer"])
    trainee.stepper.load_state(kept["scaler"])
    trainee.task.load_state_dict(state["task"])
    return Counters(
        step=kept["step"],
        skipped=kept["skipped"],
        tokens=kept["tokens"],
        nominal_weight=kept["nominal_weight"],
        position=Position(**kept["position"]),
    )
