"""What a user writes: the model, its optimizer, its data and its loss. The Trainer does the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from elastic.errors import UsageError

Weight = float | int | torch.Tensor


class MapDataset(Protocol):
    """What is asked of a dataset: a length, and items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppliedStep:
    """One step as one rank saw it. All but `rank` and `samples` is the same on every rank."""

    round: int
    step: int  # number of the step just done, from 1
    epoch: int
    rank: int
    samples: tuple[int, ...]  # indices of the dataset that this rank contributed; empty for a rank without a share
    applied: bool  # False when the update was skipped: overflow, weight 0, or nonfinite = "skip"
    loss: float  # global sum of losses / global weight
    weight: float
    learning_rate: float
    grad_norm: float  # before clipping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss over the evaluation dataset, weighted by items (or whatever the loss weighs by)."""

    step: int
    loss: float
    weight: float


def checked_weight(weight: Weight) -> float:
    """The weight as a number.

    Raises:
        UsageError: it is negative or not finite.
    """
    value = float(weight)
    if not 0.0 <= value < math.inf:
        raise UsageError(f"Task.loss returned the weight {value}; return the items or tokens that count, 0 for none")
    return value


class Task:
    """Override the first four. Every method runs on every rank, and must do the same on each."""

    def model(self) -> nn.Module:
        """A fresh model; generators are seeded before."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of `model`, whose parameters are on their device already."""
        raise NotImplementedError

    def dataset(self) -> MapDataset:
        """The training data, map-style. Item i of an epoch is fetched under seeds of its own: augment freely."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Weight]:
        """(sum of the losses, weight) of a micro-batch: the weight is its items, or the tokens that count.

        Return sums, not means: the update is then that of one big batch, however it is cut. A weight of 0 leaves the
        micro-batch out, whatever its loss is. Give the weight as a number or a CPU tensor where you can: one on a
        device makes the host wait for it.
        """
        raise NotImplementedError

    def collate(self, items: Sequence[Any]) -> Any:
        """Items -> micro-batch. Runs in the loader workers: started by spawn, they are sent a pickle of this task."""
        return torch.utils.data.default_collate(list(items))

    def tokens(self, batch: Any) -> int:
        """Tokens in a micro-batch, for the metric alone."""
        return 0

    def rate_factor(self, update: int) -> float | None:
        """A schedule of your own: factor on the optimizer's rate for update `update` (from 0). None = the config's."""
        return None

    def evaluation_dataset(self) -> MapDataset | None:
        """Data for `evaluate_every`."""
        return None

    def evaluate(self, model: Any, batch: Any) -> tuple[torch.Tensor, Weight]:
        """As `loss`, for evaluation; `model` is in evaluation mode, gradients are off."""
        return self.loss(model, batch)

    def on_step(self, step: AppliedStep) -> None:
        """Called once per step on each rank, when the update is applied (or skipped), before it saves the step.

        A rank that is killed in between misses the call for good where other nodes' memory has kept the step.
        """

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called on each rank after an evaluation."""

    def state_dict(self) -> Mapping[str, Any]:
        """State of your own to put in checkpoints: nested dicts, lists, numbers, strings, tensors. Rank 0's is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, before the first step."""

    def fingerprint(self, dataset: MapDataset) -> str | None:
        """Names the data: a checkpoint of other data is refused. None = the length and a hash of some items."""
        return None


def collate_of(task: Task) -> Callable[[Sequence[Any]], Any]:
    """What loader workers call: without the task where it is torch's default, so that the task need not be pickled."""
    own = type(task).collate is not Task.collate or "collate" in vars(task)
    default: Callable[[Any], Any] = torch.utils.data.default_collate
    return task.collate if own else default
