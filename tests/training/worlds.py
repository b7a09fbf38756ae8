"""Small tasks, and a way to train them on real ranks under a session of their own."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic.training.environment import WorkerEnvironment
from elastic.training.session import Session
from elastic.training.trainer import AppliedStep, Task, Trainer, TrainerConfig
from tests.support.plain import be_launched
from tests.support.ranks import run_ranks

VOCABULARY = 11
LENGTH = 6


class Sentences:
    """Item i: tokens and targets of LENGTH, of which a number that varies with i counts (the rest is -100)."""

    def __init__(self, size: int, *, noisy: bool = False) -> None:
        self.size, self.noisy = size, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[1 + index % LENGTH :] = -100
        inputs = (
            torch.randint(VOCABULARY, (LENGTH,)) if self.noisy else tokens[:-1]
        )  # noisy: drawn under the item's seed
        return inputs, targets


class Model(nn.Module):
    def __init__(self, *, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)  # (micro_batch, LENGTH, width)
        for layer in self.hidden:
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.head(x)


class SentenceTask(Task):
    """Records every step; `digests` are of all parameters after each step."""

    def __init__(
        self,
        *,
        size: int = 64,
        dropout: float = 0.0,
        noisy: bool = False,
        optimizer: str = "sgd",
        double: bool = False,
        frozen: bool = False,
    ) -> None:
        self.size, self.drop, self.noisy, self.kind, self.double = size, dropout, noisy, optimizer, double
        self.frozen = frozen
        self.steps: list[AppliedStep] = []
        self.digests: list[str] = []
        self.live: nn.Module | None = None

    def model(self) -> nn.Module:
        self.live = Model(dropout=self.drop)
        return self.live.double() if self.double else self.live

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.frozen:
            return torch.optim.SGD(model.head.parameters(), lr=0.5)  # type: ignore[union-attr]  # ours has a head
        if self.kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def dataset(self) -> Sentences:
        return Sentences(self.size, noisy=self.noisy)

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        tokens, targets = batch
        logits = model(tokens)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def on_step(self, step: AppliedStep) -> None:
        self.steps.append(step)
        assert self.live is not None
        self.digests.append(digest(self.live))


def digest(model: nn.Module) -> str:
    """A hash of every parameter and buffer."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        sha.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """What one rank saw."""

    steps: list[AppliedStep]
    digests: list[str]
    parameters: dict[str, Any]  # numpy: a tensor would need its sender alive
    step: int
    drained: bool
    loss: float
    comm_bytes: int
    evaluation: float | None
    scale: float | None
    skipped: int
    extra: Any = None


def make_session(rank: int, world_size: int, store: Any, **overrides: Any) -> Session:
    """The session of one rank of `run_ranks`, as under torchrun; `overrides` are fields of its environment."""
    be_launched(rank, world_size, store)
    environment = WorkerEnvironment(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        store_host="127.0.0.1",
        store_port=store.port,
        launched=True,
        elastic=True,
    )
    return Session(dataclasses.replace(environment, **overrides))


def _train(
    rank: int,
    world_size: int,
    store: Any,
    task: SentenceTask,
    config: TrainerConfig,
    overrides: Mapping[str, Any],
    stop_after: int | None,
) -> Ran:
    session = make_session(rank, world_size, store, **overrides)
    trainer = Trainer(task, config, session=session)
    if stop_after is not None:
        _stop_on_rank_zero(session, task, stop_after)
    result = trainer.run()
    assert task.live is not None
    return Ran(
        steps=task.steps,
        digests=task.digests,
        parameters={name: value.detach().numpy().copy() for name, value in task.live.state_dict().items()},
        step=result.step,
        drained=result.drained,
        loss=result.loss,
        comm_bytes=trainer._replica.comm_totals().bytes,
        evaluation=result.evaluation.loss if result.evaluation else None,
        scale=(trainer._stepper.state() or {}).get("scale"),
        skipped=trainer._at.skipped,
        extra=getattr(task, "extra", None),
    )


def _stop_on_rank_zero(session: Session, task: SentenceTask, stop_after: int) -> None:
    """Ask for a drain as soon as `stop_after` steps are done, on one rank alone."""
    before = task.on_step

    def on_step(step: AppliedStep) -> None:
        before(step)
        if session.rank == 0 and step.step == stop_after:
            session._stop_signal.came = True

    task.on_step = on_step  # type: ignore[method-assign]


def train(
    world_size: int,
    task: SentenceTask,
    config: TrainerConfig,
    *,
    stop_after: int | None = None,
    timeout_seconds: float = 60.0,
    **overrides: Any,
) -> list[Ran]:
    """Train on `world_size` ranks; what each saw. With `stop_after` a drain is asked for after that step."""
    return run_ranks(world_size, _train, task, config, overrides, stop_after, timeout_seconds=timeout_seconds)


def samples_used(runs: list[Ran], *, epoch: int | None = None) -> list[int]:
    """All indices the ranks used, sorted."""
    return sorted(
        index for run in runs for step in run.steps if epoch is None or step.epoch == epoch for index in step.samples
    )
