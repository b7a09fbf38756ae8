"""Run one function on N real processes, each a rank with a TCPStore of its own; nothing outlives the call.

Processes come from a forkserver that has torch imported already, so that a rank starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo", "pytest"),
        *("checkpoints.manager", "checkpoints.catalog", "elastic.training.trainer"),
    ]
)

KILLED = "killed"


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish in time; the message carries its traceback."""


def _run(
    connection: Connection,
    rank: int,
    world_size: int,
    port: int,
    process_group: bool,
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        if process_group:
            dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=world_size)
        result = target(rank, world_size, store, *args)
        if process_group:
            dist.destroy_process_group()
        connection.send((True, result))
    except BaseException:  # noqa: BLE001 - the parent reports it
        connection.send((False, traceback.format_exc()))
    connection.close()
    os._exit(0)


def run_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
    process_group: bool = False,
    may_die: bool = False,
) -> list[Any]:
    """Call `target(rank, world_size, store, *args)` on each of `world_size` processes and return what they returned.

    `target` is a module-level function. With `process_group` a gloo group is the default group. A rank that dies gives
    the string `KILLED` where `may_die` is set, and fails the test otherwise.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + timeout_seconds
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=_run, args=(theirs, rank, world_size, server.port, process_group, target, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results: list[Any] = [None] * world_size
    failures: list[str] = []
    pending = set(range(world_size))
    try:
        while pending:
            ready = wait([pipes[r] for r in pending], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"ranks {sorted(pending)} did not finish within {timeout_seconds} s")
            for rank in [r for r in pending if pipes[r] in ready]:
                pending.discard(rank)
                try:
                    succeeded, value = pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    succeeded, value = may_die, KILLED
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}:\n{value}")
            if failures:
                break
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            if process.is_alive() and (failures or pending):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join(10)
            pipe.close()
            process.close()
    if failures:
        raise RankFailedError("\n".join(failures))
    return results
