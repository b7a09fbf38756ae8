"""Step time of the Trainer against a bare DDP loop: same model, same data, two ranks, accumulation of four, one run.

    python -m tests.bench.bench_step [--blocks N] [--steps N]

Blocks of steps alternate in the same processes, so that whatever else the machine does hits both; the figure is the
median of the blocks' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elastic import progress
from elastic.training.trainer import AppliedStep, Task, Trainer, TrainerConfig
from tests.support.ranks import run_ranks
from tests.training.worlds import make_session

RANKS, MICRO_STEPS, MICRO_BATCH, LENGTH, VOCABULARY, WIDTH = 2, 4, 4, 64, 256, 128


Seconds = tuple[float, float]  # of the wall, of the CPU in all threads of this process


def clocks() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(began: Seconds, steps: int) -> Seconds:
    wall, cpu = clocks()
    return (wall - began[0]) / steps, (cpu - began[1]) / steps


class Tokens:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + LENGTH + 1) * 7919 % VOCABULARY


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))  # type: ignore[no-any-return]  # nn.Module gives Any


def loss_sum(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


class BareLoop:
    """What one writes by hand: no_sync, mean of means, clipping, AdamW."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Transformer(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        dataset: Any = Tokens()
        self.sampler: Any = DistributedSampler(dataset, RANKS, rank)
        self.loader = DataLoader(dataset, MICRO_BATCH, sampler=self.sampler)
        self.batches = self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        for epoch in range(1 << 30):
            self.sampler.set_epoch(epoch)
            yield from self.loader

    def step(self) -> None:
        for i in range(MICRO_STEPS):
            batch = next(self.batches)
            if i < MICRO_STEPS - 1:
                with self.model.no_sync():
                    self._backward(batch)
            else:
                self._backward(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, batch: torch.Tensor) -> None:
        (loss_sum(self.model, batch) / (batch.numel() - len(batch)) / MICRO_STEPS).backward()  # type: ignore[no-untyped-call]


class Measured(Task):
    """Trains with the Trainer; between its blocks of steps it runs blocks of the bare loop."""

    def __init__(self, rank: int, steps: int) -> None:
        self._rank, self._steps = rank, steps
        self.ours: list[Seconds] = []
        self.bare: list[Seconds] = []
        self._loop: BareLoop | None = None
        self._began = clocks()

    def model(self) -> nn.Module:
        return Transformer()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def dataset(self) -> Tokens:
        return Tokens()

    def loss(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return loss_sum(model, batch), batch.numel() - len(batch)

    def on_step(self, step: AppliedStep) -> None:
        if step.step % self._steps:
            return
        ours = since(self._began, self._steps)
        if self._loop is None:
            self._loop = BareLoop(self._rank)
            self._run_bare()  # warms up
        else:
            self.ours.append(ours)
            self.bare.append(self._run_bare())
        self._began = clocks()

    def _run_bare(self) -> Seconds:
        assert self._loop is not None
        began = clocks()
        for _ in range(self._steps):
            self._loop.step()
        return since(began, self._steps)


def _rank(
    rank: int, world_size: int, store: Any, directory: str, blocks: int, steps: int
) -> list[tuple[Seconds, Seconds]]:
    block = Path(directory) / f"progress-{rank}"
    progress.create(block)
    session = make_session(rank, world_size, store, progress_path=str(block))
    task = Measured(rank, steps)
    config = TrainerConfig(
        global_batch_size=RANKS * MICRO_STEPS * MICRO_BATCH,
        micro_batch_size=MICRO_BATCH,
        steps=(blocks + 1) * steps,
        grad_clip_norm=1.0,
        schedule="cosine",
        warmup_steps=2,
        checkpoint_dir=f"{directory}/checkpoints",
        checkpoint_every="3600s",
    )
    Trainer(task, config, session=session).run()
    return list(zip(task.ours, task.bare, strict=True))


def measure(blocks: int, steps: int) -> dict[str, float]:
    """Medians over the blocks, of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        pairs = run_ranks(RANKS, _rank, directory, blocks, steps, timeout_seconds=600)[0]
    ratios = sorted(ours[0] / bare[0] for ours, bare in pairs)
    return {
        "step_seconds_trainer": statistics.median(ours[0] for ours, _ in pairs),
        "step_seconds_bare": statistics.median(bare[0] for _, bare in pairs),
        "cpu_ratio": statistics.median(ours[1] / bare[1] for ours, bare in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartile_low": ratios[len(ratios) // 4],
        "ratio_quartile_high": ratios[-1 - len(ratios) // 4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.blocks, arguments.steps), indent=2))


if __name__ == "__main__":
    main()
