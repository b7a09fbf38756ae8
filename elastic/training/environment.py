"""What the environment says about this worker: torchrun's variables and those of our agent, parsed once."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Mapping

from elastic import values
from elastic.errors import UsageError
from elastic.progress import ENVIRONMENT_KEY as PROGRESS_KEY


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """An interval in steps or in seconds; exactly one is set."""

    steps: int | None = None
    seconds: float | None = None


def parse_every(text: str | int, *, name: str) -> Every:
    """`100` = steps; `30s`, `0.5s` or `5m` = time.

    Raises:
        UsageError: anything else; `name` says which setting it was.
    """
    try:
        word = values.interval(str(text))
    except ArgumentTypeError:
        raise UsageError(f"{name} is {text!r}; give a number of steps as 100, or a time as 30s") from None
    return Every(seconds=float(word[:-1])) if word.endswith("s") else Every(steps=int(word))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Who this worker is. Alone (no launcher at all) it is rank 0 of a world of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    round: int = 1
    run_id: str = ""
    incarnation: str = ""
    node_id: str = ""
    store_host: str | None = None
    store_port: int | None = None
    launched: bool = False  # by torchrun, our agent, or somebody else who set RANK
    elastic: bool = False  # by torchrun or our agent: someone restarts us
    progress_path: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: Every | None = None
    memory_dir: str | None = None  # the agent's folder in shared memory
    memory_rank: int = 0  # this worker among those of the folder
    memory_every: int | None = None  # steps
    allow_fresh_start: bool = False
    committed_step: int = 0  # the newest that an earlier round under the same agent has committed
    unsaved_seconds: int = 0  # since then, or since training began, when this worker was started


def read_environment(environ: Mapping[str, str], pid: int | None = None) -> WorkerEnvironment:
    """Parse the variables a launcher sets; missing ones keep the values of a worker that runs alone.

    A process that a worker has started inherits its variables, but does not speak for it: only the worker's own `pid`
    has the progress block.

    Raises:
        UsageError: a variable is there and is not a number; it is named.
    """
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    every = environ.get("ELASTICD_CHECKPOINT_EVERY")
    is_worker = environ.get("ELASTICD_WORKER_PID", str(pid)) == str(pid) or pid is None
    return WorkerEnvironment(
        rank=_number(environ, "RANK", 0),
        local_rank=_number(environ, "LOCAL_RANK", 0),
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
        round=_number(environ, "ELASTICD_ROUND", restarts + 1),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        incarnation=environ.get("ELASTICD_INCARNATION", ""),
        node_id=environ.get("ELASTICD_NODE_ID", ""),
        store_host=environ.get("MASTER_ADDR"),
        store_port=_number(environ, "MASTER_PORT", 0) or None,
        launched="RANK" in environ,
        elastic="TORCHELASTIC_RUN_ID" in environ or PROGRESS_KEY in environ,
        progress_path=(environ.get(PROGRESS_KEY) or None) if is_worker else None,
        checkpoint_dir=environ.get("ELASTICD_CHECKPOINT_DIR") or None,
        checkpoint_every=parse_every(every, name="ELASTICD_CHECKPOINT_EVERY") if every else None,
        memory_dir=(environ.get("ELASTICD_MEMORY_DIR") or None) if is_worker else None,
        memory_rank=_number(environ, "ELASTICD_LOCAL_RANK", 0),
        memory_every=_number(environ, "ELASTICD_MEMORY_EVERY", 0) or None,
        allow_fresh_start=environ.get("ELASTICD_ALLOW_FRESH_START") == "1",
        committed_step=_number(environ, "ELASTICD_COMMITTED_STEP", 0),
        unsaved_seconds=_number(environ, "ELASTICD_UNSAVED_SECONDS", 0),
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None or not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the variable {name} is {text!r}; the launcher should set it to a whole number") from None
