"""A small real training job for fault tests: Trainer, dropout, loader workers, evaluation, ledger and digest.

    training_script.py FOLDER [FAULTS]

FAULTS is JSON: round number -> fault that rank 1 commits in that round at the first step it runs with an even number
(`import` happens at import). A fault is one of import, step, loader, micro, segv; stop, sleep and spin hang, in the
loss or in a loader worker; long takes long for an evaluation and for a save, and is slow at every micro-step.
Files in FOLDER: `ledger` (a line per rank and step), `digest` (at the end), `now` (what rank 0 is doing).
While there is a file `slow`, micro-steps take long, so that the training does not end before what the test waits for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
FAULTS = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
RANK, ROUND = int(os.environ["RANK"]), os.environ["ELASTICD_ROUND"]
FAULT = FAULTS.get(ROUND, "") if RANK == 1 else ""
if FAULT == "import":
    raise ImportError("broken at import")

gc.disable()  # a fifth of the long imports is the search for garbage among what they make
import torch
import torch._dynamo  # what DDP and optimizers import when first used
from torch import nn

from elastic.demo.ledger import planned_steps, read_ledger, unwritten
from elastic.demo.records import LineFile, ledger_record, parameter_digest, write_digest
from elastic.demo.slow_storage import SlowStorage
from elastic.training.session import session
from elastic.training.trainer import AppliedStep, Task, Trainer, TrainerConfig

gc.freeze()  # a search through all of that takes a third of a second, and would make a rank slow
gc.enable()
SAMPLES, GLOBAL, MICRO, SEED = 67, 8, 2, 5
STEPS = int(os.environ.get("TEST_STEPS", "30"))
SLOW_SECONDS = float(os.environ.get("TEST_STEP_SECONDS", "0.01"))
SLOWER_SECONDS = 0.2
SAVE_SECONDS = float(os.environ.get("TEST_SAVE_SECONDS", "0"))  # that each shard takes longer
LONG_SECONDS = 4.0
STRAGGLING_SECONDS = 0.1


class Items:
    """Noise that depends on the item's own seeds, so that a wrong seed shows in the digest."""

    def __init__(self, *, evaluating: bool = False) -> None:
        self.evaluating = evaluating

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if FAULT == "loader" and index % 5 == 0:
            raise RuntimeError(f"item {index} cannot be read")
        if FAULT == "spin" and not self.evaluating and (FOLDER / "spin").exists():
            spin()
        return torch.randn(6) + index / SAMPLES


class Job(Task):
    def __init__(self) -> None:
        self.ledger = LineFile(FOLDER / "ledger")
        self.network: nn.Module | None = None
        self.step = 0
        self.losses_asked = 0
        self.evaluated = self.saved = self.closed_up = False

    def model(self) -> nn.Module:
        self.network = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        return self.network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def dataset(self) -> Items:
        return Items()

    def loss(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        time.sleep(SLOWER_SECONDS if (FOLDER / "slow").exists() else SLOW_SECONDS)
        if FAULT == "long":
            time.sleep(STRAGGLING_SECONDS)
        self.losses_asked += 1
        if self.losses_asked > 5:
            commit_fault(self.losses_asked)
        return (model(batch).squeeze(-1) - batch.sum(-1)).square().sum(), len(batch)

    def evaluation_dataset(self) -> Items:
        return Items(evaluating=True)

    def evaluate(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        say("evaluation")
        time.sleep(LONG_SECONDS if FAULT == "long" and not self.evaluated else 5 * SLOW_SECONDS)
        self.evaluated = True
        return (model(batch).squeeze(-1) - batch.sum(-1)).square().sum(), len(batch)

    def state_dict(self) -> dict[str, Any]:
        if FAULT == "long" and not self.saved:
            time.sleep(LONG_SECONDS)
        self.saved = True
        return {}

    def close_up(self, base_step: int) -> None:
        """As the demo's worker: what ranks that were killed after an update could not write down."""
        if self.closed_up or RANK or base_step < 1:
            return
        self.closed_up = True
        first = max(1, base_step - 16)
        plan = planned_steps(
            samples=SAMPLES, global_batch=GLOBAL, micro_batch=MICRO, seed=SEED, steps=base_step, first=first
        )
        written = read_ledger((FOLDER / "ledger").read_text()).entries
        for entry in unwritten(written, plan, closed_by=session().round):
            self.ledger.append(dataclasses.asdict(entry))

    def on_step(self, step: AppliedStep) -> None:
        self.close_up(step.step - 1)
        self.closed_up = True
        self.ledger.append(ledger_record(step))
        say("step")


def commit_fault(losses_asked: int) -> None:
    """`micro`: between the two micro-steps of a step; the others in the first."""
    if FAULT == "micro" and losses_asked % 2 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if losses_asked % 2 == 0:
        return
    if FAULT == "step":
        raise ValueError("broken at a step")
    if FAULT == "segv":
        ctypes.string_at(0)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "sleep":
        fall_asleep()
    if FAULT == "spin":
        (FOLDER / "spin").touch()


def fall_asleep() -> None:
    time.sleep(3600)


def spin() -> None:
    while True:
        pass


def say(what: str) -> None:
    if RANK == 0:
        (FOLDER / "now").write_text(what)


def main() -> None:
    config = TrainerConfig(
        global_batch_size=GLOBAL,
        micro_batch_size=MICRO,
        steps=STEPS,
        seed=SEED,
        evaluate_every=6,
        evaluation_batch_size=16,
        loader_workers=1,
        grad_clip_norm=1.0,
        schedule="cosine",
        device=os.environ.get("TEST_DEVICE", "cpu"),
    )
    job = Job()
    directory = session().checkpoint_dir
    storage: Any = SlowStorage(directory, SAVE_SECONDS) if SAVE_SECONDS and directory else None
    result = Trainer(job, config, storage=storage).run()
    job.close_up(result.step)
    if not result.drained and RANK == 0 and job.network is not None:
        write_digest(FOLDER / "digest", step=result.step, digest=parameter_digest(job.network))


if __name__ == "__main__":
    main()
