"""What `elasticd demo` is asked to do, and the command lines it becomes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elastic.demo.ledger import Sample, planned_steps
from elastic.demo.text import count_windows, default_text, read_text
from elastic.errors import UsageError

GLOBAL_BATCH = 16
CONTEXT = 64
_SAMPLES = 1000  # 63 steps: a run of the default length crosses epochs, whose last batch is smaller
_MOST_WORKERS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One demo; both of its runs share all of this."""

    workers: int
    steps: int
    save_every: int  # steps
    samples: int  # windows of the text
    seed: int
    data: Path
    json: bool
    keep: bool

    @property
    def micro_batch(self) -> int:
        """So that each worker accumulates over two micro-batches, as far as the global batch reaches."""
        return max(1, GLOBAL_BATCH // (2 * self.workers))

    @property
    def kill_at(self) -> int:
        """The step at which a worker is killed: about the middle, halfway between two checkpoints."""
        return self.steps // 2 // self.save_every * self.save_every + self.save_every // 2

    def plan(self) -> dict[int, tuple[Sample, ...]]:
        """What training must use: step -> its samples."""
        return planned_steps(
            samples=self.samples,
            global_batch=GLOBAL_BATCH,
            micro_batch=self.micro_batch,
            seed=self.seed,
            steps=self.steps,
        )

    def command(self, folder: Path) -> list[str]:
        """The agent with its job, leaving all its files in `folder`."""
        agent = {
            "--nproc-per-node": self.workers,
            "--rdzv-id": "elasticd-demo",
            "--http": "127.0.0.1:0",
            "--checkpoint-dir": folder / "checkpoints",
            "--checkpoint-every": self.save_every,
            "--log-dir": folder / "logs",
            "--redirects": 3,
        }
        worker = {
            "--device": "cpu",
            "--data": self.data,
            "--context": CONTEXT,
            "--samples": self.samples,
            "--steps": self.steps,
            "--global-batch": GLOBAL_BATCH,
            "--micro-batch": self.micro_batch,
            "--seed": self.seed,
            "--ledger": folder / "ledger.jsonl",
            "--losses": folder / "losses.jsonl",
            "--digest": folder / "digest",
        }
        command = [sys.executable, "-m", "elastic", "run", *_flags(agent)]
        return [*command, "-m", "elastic.demo.bytelm", *_flags(worker)]


def _flags(values: dict[str, object]) -> list[str]:
    return [f"{flag}={value}" for flag, value in values.items()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see elasticd demo --help")


def parse(argv: Sequence[str]) -> Settings:
    """Raises: UsageError."""
    parser = _Parser(
        prog="elasticd demo",
        description="Train a small language model on real text, kill a worker with SIGKILL in mid-run, and show that "
        "training went on without losing or repeating a sample: its parameters are those of a run without the kill.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--steps", type=int, default=160, metavar="N", help="default: %(default)s")
    add("--save-every", type=int, metavar="STEPS", help="steps between checkpoints; default: a tenth of --steps")
    add("--seed", type=int, default=0, help="of weights and order; default: %(default)s")
    add("--data", type=Path, metavar="FILE|DIR", help="text to learn; default: the sources of Python's library")
    add("--json", action="store_true", help="print the result as JSON, and what happens on stderr")
    add("--keep", action="store_true", help="keep the folder with logs, ledgers and checkpoints")
    options = parser.parse_args(list(argv))
    save_every = options.save_every if options.save_every is not None else max(2, options.steps // 10)
    _check(options.workers, options.steps, save_every)
    data = (options.data or default_text()).absolute()
    return Settings(
        workers=options.workers,
        steps=options.steps,
        save_every=save_every,
        samples=min(_SAMPLES, count_windows(read_text(data), context=CONTEXT)),
        seed=options.seed,
        data=data,
        json=options.json,
        keep=options.keep,
    )


def _check(workers: int, steps: int, save_every: int) -> None:
    if not 1 <= workers <= _MOST_WORKERS:
        raise UsageError(f"--workers {workers}: give 1 to {_MOST_WORKERS}")
    if steps < 20:
        raise UsageError(f"--steps {steps}: give at least 20, so that there is a middle to kill a worker in")
    if not 2 <= save_every <= steps // 4:
        raise UsageError(
            f"--save-every {save_every}: give 2 to {steps // 4}, so that a checkpoint comes before the kill"
        )
