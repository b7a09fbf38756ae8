"""`python -m elastic.demo.bytelm`: a worker that trains the byte-level GPT of `model` on the text of `data`.

Runs under `elasticd run`, under torchrun and alone. All that makes training fault tolerant is in the Trainer; here are
a model, some text, and flags that make the run slow, recorded and comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

import torch
from torch import Tensor, nn

import elastic
from elastic.demo.data import Windows
from elastic.demo.ledger import planned_steps, read_ledger, unwritten
from elastic.demo.model import GPT, GPTConfig, next_byte_loss
from elastic.demo.records import LineFile, ledger_record, parameter_digest, write_digest, write_parameters
from elastic.demo.slow_storage import SlowStorage
from elastic.demo.text import default_text, read_text
from elastic.errors import ElasticError, UsageError
from elastic.journal import stderr_handler
from elastic.training.trainer import AppliedStep, Task, Trainer, TrainerConfig
from elastic.training.trainer_config import Device, Precision, StartMethod

if TYPE_CHECKING:
    from checkpoints.storage import Storage

_STEPS_LOOKED_BACK = 16  # for what is missing in the ledger: more rounds than may end within one step

logger = logging.getLogger("elastic.demo.bytelm")  # by name: this file is also run as __main__


class ByteLM(Task):
    """Predict the next byte."""

    def __init__(self, options: argparse.Namespace, *, world_size: int) -> None:
        self._options = options
        self._shape = GPTConfig(
            layers=options.layers,
            heads=options.heads,
            width=options.width,
            context=options.context,
            dropout=options.dropout,
            tie_weights=options.tie_weights,
        )
        self._micro_batches: int = math.ceil(math.ceil(options.global_batch / options.micro_batch) / world_size)
        self._pause_seconds = self._read_pause()
        self._ledger = LineFile(options.ledger) if options.ledger else None
        self._ledger_is_closed_up = False  # as far as other rounds wrote it
        self._losses = LineFile(options.losses) if options.losses else None
        self.network: nn.Module | None = None  # made by the Trainer, and trained when it is done

    def model(self) -> nn.Module:
        self.network = GPT(self._shape)
        return self.network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, whose weight decay leaves vectors (biases, norms) alone."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self._options.lr, betas=(0.9, 0.95))

    def dataset(self) -> Windows:
        text = read_text(self._options.data)
        windows = Windows(text, context=self._options.context, samples=self._options.samples)
        self._samples = len(windows)
        return windows

    def loss(self, model: Any, batch: Tensor) -> tuple[Tensor, int]:
        time.sleep(self._pause_seconds)
        return next_byte_loss(model, batch)

    def tokens(self, batch: Tensor) -> int:
        return batch.shape[0] * self._shape.context

    def _read_pause(self) -> float:
        """Seconds that a micro-batch is made longer by. The file may change at any time, or not be there yet."""
        seconds: float = self._options.step_seconds
        if self._options.pace is not None:
            with contextlib.suppress(OSError, ValueError):
                seconds = float(self._options.pace.read_text())
        return seconds / self._micro_batches

    def close_up(self, base_step: int, *, rank: int, round_number: int) -> None:
        """Write what ranks that were killed put into the steps up to `base_step`, from which this round goes on.

        Called before a round's first line, and when training is over: a round may have no step left. Rank 0 does it.
        """
        options, first = self._options, max(1, base_step - _STEPS_LOOKED_BACK)
        is_closed_up, self._ledger_is_closed_up = self._ledger_is_closed_up, True
        if self._ledger is None or rank or is_closed_up or not options.ledger.is_file():  # a pipe, /dev/null
            return
        plan = planned_steps(
            samples=self._samples,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            seed=options.seed,
            steps=base_step,
            first=first,
        )
        for entry in unwritten(read_ledger(options.ledger.read_text()).entries, plan, closed_by=round_number):
            logger.info("step=%d: the samples of a rank that was killed after its update are written now", entry.step)
            self._ledger.append(dataclasses.asdict(entry))

    def on_step(self, step: AppliedStep) -> None:
        self._pause_seconds = self._read_pause()
        self.close_up(step.step - 1, rank=step.rank, round_number=step.round)
        if self._ledger is not None:
            self._ledger.append(ledger_record(step))
        if step.rank:
            return
        if self._losses is not None:
            self._losses.append({"round": step.round, "step": step.step, "loss": step.loss, "time": time.time()})
        if step.step % self._options.log_every == 0:
            logger.info("round=%d step=%d loss=%.4f", step.round, step.step, step.loss)


def main(argv: Sequence[str]) -> int:
    """Train as the flags say. Raises: ElasticError."""
    options = parse(argv)
    session = elastic.session()
    try:
        config = trainer_config(options)
        task = ByteLM(options, world_size=session.world_size)
    except UsageError as error:
        session.fatal(error)  # no retry will change the flags
        raise
    directory, storage = session.checkpoint_dir or options.checkpoint_dir, None
    if options.save_seconds and directory:
        storage = cast("Storage", SlowStorage(directory, options.save_seconds))
    result = Trainer(task, config, storage=storage).run()
    task.close_up(result.step, rank=session.rank, round_number=session.round)
    if session.rank == 0 and not result.drained and task.network is not None:
        if options.parameters:
            write_parameters(options.parameters, task.network)
        if options.digest:
            write_digest(options.digest, step=result.step, digest=parameter_digest(task.network))
    return 0


def trainer_config(options: argparse.Namespace) -> TrainerConfig:
    """The Trainer's settings; what is wrong with them it says itself."""
    return TrainerConfig(
        global_batch_size=options.global_batch,
        micro_batch_size=options.micro_batch,
        steps=options.steps if options.steps or options.epochs else 1000,
        epochs=options.epochs,
        seed=options.seed,
        device=options.device,
        precision=options.precision,
        grad_clip_norm=1.0,
        warmup_steps=min(options.warmup, options.steps or options.warmup),
        loader_workers=options.loader_workers,
        loader_start_method=options.loader_start_method,
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.save_every,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        error = UsageError(f"{message}; see python -m elastic.demo.bytelm --help")
        elastic.session().fatal(error)
        raise error


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags -> options. Raises: UsageError."""
    parser = _Parser(prog="bytelm", description="Train a byte-level GPT on text.", allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, default=default_text(), metavar="FILE|DIR", help="default: Python's own library")
    add("--samples", type=_at_least_1, metavar="N", help="use the first N windows of the text; default: all")
    add("--steps", type=_at_least_1, metavar="N", help="optimizer steps; default: 1000 without --epochs")
    add("--epochs", type=_at_least_1, metavar="N", help="passes over the data, instead of --steps")
    add("--global-batch", type=_at_least_1, default=16, metavar="N", help="windows per step over all ranks")
    add("--micro-batch", type=_at_least_1, default=4, metavar="N", help="most windows in one forward")
    add("--seed", type=int, default=0, help="of weights, order and dropout")
    add("--lr", type=_not_negative, default=1e-3, help="learning rate")
    add("--warmup", type=int, default=0, metavar="STEPS", help="steps in which the learning rate rises to --lr")
    add("--device", choices=get_args(Device), default="auto")
    add("--precision", choices=get_args(Precision), default="fp32")
    add("--loader-workers", type=int, default=0, metavar="N", help="processes that read ahead; 0 = none")
    add("--loader-start-method", choices=get_args(StartMethod), help="how they start; default: the platform's")
    shape = GPTConfig()
    for name, text in (("layers", "blocks"), ("heads", "of attention"), ("width", "of a block"), ("context", "bytes")):
        add(f"--{name}", type=_at_least_1, default=getattr(shape, name), metavar="N", help=text)
    add("--dropout", type=float, default=shape.dropout, metavar="SHARE")
    add("--no-tie-weights", dest="tie_weights", action="store_false", help="an output layer with weights of its own")
    add("--checkpoint-dir", metavar="DIR", help="without an agent, or where it says none")
    add("--save-every", metavar="N|Ns", help="steps or seconds between checkpoints; default: at the end alone")
    add("--save-seconds", type=_not_negative, default=0.0, metavar="S", help="make each save's commit longer by this")
    add("--step-seconds", type=_not_negative, default=0.0, metavar="S", help="make each step longer by this")
    add("--pace", type=Path, metavar="FILE", help="or by the seconds in this file, which may change meanwhile")
    add("--ledger", type=Path, metavar="FILE", help="append what each rank used in each step, as JSON lines")
    add("--losses", type=Path, metavar="FILE", help="append loss and time of each step, as JSON lines")
    add("--digest", type=Path, metavar="FILE", help="write `step sha256` of all parameters at the end")
    add("--parameters", type=Path, metavar="FILE", help="write all parameters at the end, as safetensors")
    add("--log-every", type=_at_least_1, default=10, metavar="STEPS", help="log the loss this often")
    return parser.parse_args(list(argv))


def _at_least_1(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give at least 1") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; give at least 1")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give one from 0") from None
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a number from 0")
    return value


def _run() -> int:
    """As a program: log, and without an agent that would want the traceback, say errors in one line."""
    logging.basicConfig(level=logging.INFO, handlers=[stderr_handler()])
    try:
        return main(sys.argv[1:])
    except ElasticError as error:
        if elastic.session().under_agent:
            raise
        sys.stderr.write(f"bytelm: error: {error}\n")
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(_run())
