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
from elastic.status import JobStatus

GLOBAL_BATCH = 16
CONTEXT = 64
_SAMPLES = 1000  # 63 steps: a run of the default length crosses epochs, whose last batch is smaller
_MOST_WORKERS = 16
_MOST_NODES = 8
LEASE_TTL_SECONDS = 2
_LAST_CALL_SECONDS = 60  # all nodes are started at once, and the first round is to have them all
_LAST_STEPS = 16  # enough for a change and for some steps after it
_STEP_SECONDS = 0.05  # so that standbys get warm while training goes on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One demo; both of its runs share all of this."""

    nodes: int
    workers: int  # on each node
    steps: int
    save_every: int  # steps
    samples: int  # windows of the text
    seed: int
    data: Path
    json: bool
    keep: bool

    @property
    def world_size(self) -> int:
        """When all nodes are there."""
        return self.nodes * self.workers

    @property
    def micro_batch(self) -> int:
        """So that each worker accumulates over two micro-batches, as far as the global batch reaches."""
        return max(1, GLOBAL_BATCH // (2 * self.world_size))

    @property
    def kill_at(self) -> int:
        """The first step at which something may be killed, halfway between two checkpoints.

        A quarter of the way, with several nodes an eighth: more is to come after it.
        """
        checkpoints = max(1, self.steps // (4 if self.nodes == 1 else 8) // self.save_every)
        return checkpoints * self.save_every + self.save_every // 2

    def may_change(self, status: JobStatus) -> bool:
        """Once the standbys are warm, as they are for nearly all of a long run; but not too late for what follows."""
        step = min((worker.step or 0 for worker in status.workers), default=0)
        return all(worker.standby for worker in status.workers) or self.is_late(step)

    def is_late(self, step: int) -> bool:
        """No time is left to wait for what would be nice."""
        return step >= self.steps - min(_LAST_STEPS, self.steps // 4)

    def plan(self) -> dict[int, tuple[Sample, ...]]:
        """What training must use: step -> its samples."""
        return planned_steps(
            samples=self.samples,
            global_batch=GLOBAL_BATCH,
            micro_batch=self.micro_batch,
            seed=self.seed,
            steps=self.steps,
        )

    def command(self, folder: Path, *, in_peace: bool) -> list[str]:
        """One agent with all workers, leaving all its files in `folder`. In peace it needs no standbys."""
        agent = {"--nproc-per-node": self.world_size, **self._agent(shared=folder, own=folder)}
        if in_peace:
            return _elasticd_run({**agent, "--no-standby": None}, self._worker(folder))
        return _elasticd_run(agent, {**self._worker(folder), "--step-seconds": _STEP_SECONDS})

    def node_command(self, node_id: str, endpoint: str, *, shared: Path, own: Path) -> list[str]:
        """The agent of one node. Checkpoints and what the run is judged by go to `shared`."""
        agent = {
            "--nnodes": f"{self.nodes - 1}:{self.nodes}",
            "--nproc-per-node": self.workers,
            "--node-id": node_id,
            "--rdzv-backend": "etcd3",
            "--rdzv-endpoint": endpoint,
            "--lease-ttl": LEASE_TTL_SECONDS,
            "--last-call": _LAST_CALL_SECONDS,
            **self._agent(shared=shared, own=own),
        }
        return _elasticd_run(agent, {**self._worker(shared), "--pace": pace_file(shared)})

    def _agent(self, *, shared: Path, own: Path) -> dict[str, object]:
        return {
            "--rdzv-id": "elasticd-demo",
            "--http": "127.0.0.1:0",
            "--checkpoint-dir": shared / "checkpoints",
            "--checkpoint-every": self.save_every,
            "--memory-every": 1,
            "--log-dir": own / "logs",
            "--redirects": 3,
        }

    def _worker(self, folder: Path) -> dict[str, object]:
        return {
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
            "--parameters": folder / "parameters.safetensors",
        }


def pace_file(shared: Path) -> Path:
    """Where nodes look for how much longer a step is to take, in seconds."""
    return shared / "pace"


def _elasticd_run(agent: dict[str, object], worker: dict[str, object]) -> list[str]:
    command = [sys.executable, "-m", "elastic", "run", *_flags(agent)]
    return [*command, "-m", "elastic.demo.bytelm", *_flags(worker)]


def _flags(values: dict[str, object]) -> list[str]:
    return [flag if value is None else f"{flag}={value}" for flag, value in values.items()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see elasticd demo --help")


def parse(argv: Sequence[str]) -> Settings:
    """Raises: UsageError."""
    parser = _Parser(
        prog="elasticd demo",
        description="Train a small language model on real text, kill a worker with SIGKILL in mid-run, and show that "
        "training went on without losing or repeating a sample: its parameters are those of a run without the kill. "
        "With --nodes, agents that meet in an etcd: kill a node, add it again, drain another.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="agents; more than one need an etcd; default: %(default)s")
    add("--workers", type=int, metavar="N", help="on each node; default: 2, with several nodes 1")
    add("--steps", type=int, default=100, metavar="N", help="default: %(default)s")
    add("--save-every", type=int, metavar="STEPS", help="steps between checkpoints; default: a tenth of --steps")
    add("--seed", type=int, default=0, help="of weights and order; default: %(default)s")
    add("--data", type=Path, metavar="FILE|DIR", help="text to learn; default: the sources of Python's library")
    add("--json", action="store_true", help="print the result as JSON, and what happens on stderr")
    add("--keep", action="store_true", help="keep the folder with logs, ledgers and checkpoints")
    options = parser.parse_args(list(argv))
    if not 1 <= options.nodes <= _MOST_NODES:
        raise UsageError(f"--nodes {options.nodes}: give 1 to {_MOST_NODES}")
    workers = options.workers if options.workers is not None else 2 if options.nodes == 1 else 1
    steps: int = options.steps
    save_every = options.save_every if options.save_every is not None else max(2, steps // 10)
    _check(workers, steps, save_every)
    data = (options.data or default_text()).absolute()
    return Settings(
        nodes=options.nodes,
        workers=workers,
        steps=steps,
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
