"""The Trainer copies beside the next forward what only an update changes, and finds out where a forward changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints.image import Copying
from elastic.training.steadiness import Steadiness
from elastic.training.trainer import Trainer, TrainerConfig
from tests.support.ranks import run_ranks
from tests.training.worlds import VOCABULARY, Model, SentenceTask, make_session

STEPS = 8


class Normalised(Model):
    """Its running statistics change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(tokens).transpose(1, 2)).transpose(1, 2)


class Clamping(Model):
    """Bounds its weights in each forward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.embedding.weight.clamp_(-0.3, 0.3)
        return super().forward(tokens)


class Swapping(SentenceTask):
    """Evaluates with other weights, which it puts into the model for that time, as with a moving average."""

    def evaluation_dataset(self) -> Any:
        return self.dataset()

    def evaluate(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.mul_(0.5)
            result = self.loss(model, batch)
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
        return result


class Of(SentenceTask):
    """Trains a model of this class."""

    def __init__(self, kind: type[Model]) -> None:
        super().__init__(size=40, optimizer="adam")
        self.of = kind

    def model(self) -> nn.Module:
        self.live = self.of()
        return self.live


def train(
    rank: int, world: int, store: Any, task: SentenceTask, folder: str, steps: int, more: dict[str, Any]
) -> tuple[list[str], int, str]:
    """(digests after each step, tensors that were copied beside training, what became of overlapping)."""
    copied = 0
    run = Copying.run

    def counted(copying: Copying) -> None:
        nonlocal copied
        copied += copying.pending
        run(copying)

    Copying.run = counted  # type: ignore[method-assign]  # in this rank's process alone
    session = make_session(
        rank, world, store, memory_dir=folder, memory_rank=rank, local_world_size=world, memory_every=1
    )
    config = TrainerConfig(global_batch_size=8, micro_batch_size=2, steps=steps, **more)
    trainer = Trainer(task, config, session=session)
    trainer.run()
    return task.digests, copied, trainer._saver._steadiness._state


def ran(task: SentenceTask, folder: Path, steps: int, **more: Any) -> list[tuple[list[str], int, str]]:
    return run_ranks(2, train, task, str(folder), steps, more)


@pytest.mark.parametrize(
    ("task", "state"),
    [
        (Of(Normalised), "steady"),
        (Swapping(size=40, optimizer="adam"), "steady"),
        (Of(Clamping), "off"),
    ],
    ids=["buffers change", "an evaluation changes", "a forward changes"],
)
def test_state_comes_back_as_it_was_whatever_a_forward_changes(tmp_path: Path, task: SentenceTask, state: str) -> None:
    """Five steps, then the rest from memory: bit-equal to all at once."""
    more = {"evaluate_every": 2} if isinstance(task, Swapping) else {}
    whole = ran(task, tmp_path / "whole", STEPS, **more)
    first = ran(task, tmp_path / "parts", 5, **more)
    rest = ran(task, tmp_path / "parts", STEPS, **more)
    for rank in range(2):
        assert first[rank][0] + rest[rank][0] == whole[rank][0]
        assert whole[rank][2] == state
        assert (whole[rank][1] > 0) == (state == "steady")


def test_overlap_can_be_turned_off(tmp_path: Path) -> None:
    for _, copied, state in ran(SentenceTask(size=40), tmp_path, 4, overlap_copies=False):
        assert (copied, state) == (0, "off")


def test_a_task_that_begins_to_change_its_weights_later_is_found_out_and_goes_on(tmp_path: Path) -> None:
    with_change = ran(Late(size=40, optimizer="adam"), tmp_path / "a", STEPS)
    assert "off" in {state for _, _, state in with_change}  # a rank whose share is of moments alone need not care
    at_once = ran(Late(size=40, optimizer="adam"), tmp_path / "b", STEPS, overlap_copies=False)
    assert [digests for digests, *_ in with_change] == [digests for digests, *_ in at_once]


class Late(SentenceTask):
    """Clamps its weights before a forward, from the fifth step on."""

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        if len(self.steps) >= 4:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)
        return super().loss(model, batch)


def test_a_tensor_is_steady_once_a_step_has_left_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.zeros(3)
    steadiness = Steadiness(lambda: [weight], overlap=True)
    assert list(steadiness.at_copy()) == []
    steadiness.at_settle(after_forward=False)  # an evaluation: no forward of training has been seen
    assert list(steadiness.at_copy()) == []
    steadiness.at_settle()
    weight.add_(1)  # the update
    assert list(steadiness.at_copy()) == [weight]
    steadiness.at_settle()
    steadiness.broken()
    assert list(steadiness.at_copy()) == []
    assert caplog.text.count("changes its parameters in a forward") == 1
    moving = Steadiness(lambda: [weight], overlap=True)
    moving.at_copy()
    weight.add_(1)  # before it was settled
    moving.at_settle()
    for _ in range(3):
        assert list(moving.at_copy()) == []
        moving.at_settle()
    assert caplog.text.count("changes its parameters in a forward") == 2
