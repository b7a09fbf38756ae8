"""The mean loss over the evaluation data: all ranks in step, without gradients, without a trace in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from elastic.training import seeding
from elastic.training.batching import cut, deal
from elastic.training.loader import Stream
from elastic.training.session import Session
from elastic.training.task import Evaluation, MapDataset, Task, collate_of
from elastic.training.trainer_config import TrainerConfig

_BATCHES_PER_AGREEMENT = 8  # a drain is seen within so many evaluation batches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOutcome:
    """What the ranks agreed on while evaluating; no result when they stopped before the end."""

    evaluation: Evaluation | None
    stop: bool
    save: bool


class Evaluator:
    """Made once per round; the data are dealt anew for whatever world this is."""

    def __init__(
        self, task: Task, dataset: MapDataset, config: TrainerConfig, session: Session, device: torch.device
    ) -> None:
        self._task, self._dataset, self._config = task, dataset, config
        self._session, self._device = session, device
        self._batches = cut(len(dataset), config.evaluation_batch_size or config.micro_batch_size)

    def run(
        self, model: nn.Module, *, step: int, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> EvaluationOutcome:
        """Evaluate, or stop halfway when a drain is asked for. Collective.

        `model` is the bare module: DDP's forward would broadcast buffers and hang where ranks have unequal shares.
        """
        start, stop = deal(len(self._batches), self._session.rank, self._session.world_size)
        mine = self._batches[start:stop]
        longest = deal(len(self._batches), 0, self._session.world_size)[1]
        total = weight = 0.0
        save = False
        with seeding.preserved_random_state(), _evaluating(model):
            stream = self._stream(mine)
            for done in range(0, max(longest, 1), _BATCHES_PER_AGREEMENT):
                for _ in mine[done : done + _BATCHES_PER_AGREEMENT]:
                    batch = stream.next()
                    self._session.beat()
                    with autocast():
                        loss, amount = self._task.evaluate(model, batch)
                    total, weight = total + float(loss), weight + float(amount)
                agreed = self._session.agree(sums=(total, weight))
                save |= agreed.save
                if agreed.stop:
                    return EvaluationOutcome(evaluation=None, stop=True, save=save)
            total, weight = agreed.sums
        result = Evaluation(step=step, loss=total / weight if weight else float("nan"), weight=weight)
        return EvaluationOutcome(evaluation=result, stop=False, save=save)

    def _stream(self, mine: list[tuple[int, int]]) -> Stream:
        keys = ([(0, index) for index in range(a, b)] for a, b in mine)
        in_process = dataclasses.replace(self._config, loader_workers=0)
        return Stream(self._dataset, keys, collate=collate_of(self._task), config=in_process, device=self._device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
