"""Programs on ranks that find what a launcher gives them, and no agent; started in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from typing import Any

from tests.support.ranks import run_ranks


def run_plainly(world_size: int, script: str, *args: str, environ: dict[str, str] | None = None) -> None:
    """Run the script to its end as a launcher would, with `environ` added. Raises: RankFailedError."""
    run_ranks(world_size, _run_script, script, args, environ or {}, timeout_seconds=100)


def be_launched(rank: int, world_size: int, store: Any) -> None:
    """Make a rank of `run_ranks` look as if torchrun had started it."""
    # Loader workers are children, which multiprocessing refuses to its daemons.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def _run_script(
    rank: int, world_size: int, store: Any, script: str, args: tuple[str, ...], environ: dict[str, str]
) -> None:
    be_launched(rank, world_size, store)
    os.environ.update(environ)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
