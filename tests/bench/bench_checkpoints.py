"""Checkpoints side by side with what else there is, in one run on two ranks: `python -m tests.bench.bench_checkpoints`.

Each figure is the median over the repeats of the slower rank's wall time. Every repeat runs all candidates one after
the other, so that a busy machine slows them alike; quote the ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from checkpoints.manager import CheckpointManager
from tests.support.ranks import run_ranks

CHUNK_BYTES = 16 << 20
Times = dict[str, list[float]]

GOALS = [
    ("stall of save", "stall", "copy into a warm buffer", "copy", 1.5),
    ("stall of save", "stall", "stall of DCP async_save", "dcp_async_stall", 0.1),
    ("beside a forward", "overlapped", "copy into a warm buffer", "copy", 1.5),
    ("beside a forward", "overlapped", "stall of DCP async_save", "dcp_async_stall", 0.1),
    ("commit", "commit", "write + fsync, O_DIRECT off", "write_fsync", 1.25),
    ("commit", "commit", "DCP save", "dcp_save", 0.5),
    ("commit", "commit", "torch.save + fsync", "torch_save", 1.0),
    ("restore", "restore", "plain read", "read", 1.5),
    ("restore", "restore", "DCP load", "dcp_load", 1.0),
]


def make_state(megabytes: int) -> dict[str, Any]:
    """A transformer-like state: weights in fp32 and two moments, in tensors of 16 MiB and a tail of small ones."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for number in range(max(megabytes // 48, 1)):
        state["model"][f"layer.{number}.weight"] = torch.randn(2048, 2048)
        state["model"][f"layer.{number}.bias"] = torch.randn(2048)
        for moment in ("exp_avg", "exp_avg_sq"):
            state["optimizer"][f"{number}.{moment}"] = torch.randn(2048, 2048)
    return state


def timed(times: Times, name: str, action: Callable[[], Any]) -> Any:
    """Run an action on all ranks at once and note how long the slower one took."""
    dist.barrier()
    started = time.monotonic()
    result = action()
    took = torch.tensor(time.monotonic() - started, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    times.setdefault(name, []).append(took.item())
    return result


def write_and_sync(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), CHUNK_BYTES):
            file.write(data[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())


def read_fresh(directory: Path) -> list[bytearray]:
    """The bytes of all shards into fresh memory, as a restore must."""
    buffers = []
    for path in sorted(directory.glob("shard-*")):
        buffers.append(bytearray(path.stat().st_size))
        with path.open("rb", buffering=0) as file:
            view, done = memoryview(buffers[-1]), 0
            while count := file.readinto(view[done : done + CHUNK_BYTES]):
                done += count
    return buffers


def torch_save(path: Path, state: Any, rank: int) -> None:
    if rank == 0:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def save_beside_forward(
    times: Times, manager: CheckpointManager, step: int, state: Any, forward_seconds: float
) -> None:
    """What a loop waits for when the copy goes on while a device computes; the forward here is a sleep of the host."""
    tensors = [tensor for part in state.values() for tensor in part.values()]
    dist.barrier()
    began = time.monotonic()
    manager.save(step, state, steady=tensors)
    waited = time.monotonic() - began
    time.sleep(forward_seconds)
    began = time.monotonic()
    manager.settle()
    took = torch.tensor(waited + time.monotonic() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    times.setdefault("overlapped", []).append(took.item())
    result = manager.wait()
    assert result is not None
    assert result.state == "committed", result


def measure(
    rank: int,
    world_size: int,
    store: dist.Store,
    directory: Path,
    megabytes: int,
    repeats: int,
    forward_seconds: float,
) -> Times:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    state = make_state(megabytes)
    times: Times = {}
    own = dist.new_group(backend="gloo")  # async_save on the default group deadlocks against training
    manager = CheckpointManager(directory / "ours", rank=rank, world_size=world_size, store=store, keep_last=1)
    manager.restore()
    share = torch.cat([t.flatten() for t in state["model"].values()]).view(torch.uint8)
    size = sum(t.numel() * t.element_size() for part in state.values() for t in part.values()) // world_size
    share = share.repeat(size // share.numel() + 1)[:size]
    warm = torch.zeros_like(share)
    for step in range(repeats + 1):
        timed(times, "copy", lambda: warm.copy_(share))
        dist.barrier()
        timed(times, "stall", lambda: manager.save(2 * step, state))  # noqa: B023
        result = manager.wait()
        assert result is not None
        assert result.state == "committed", result
        took = torch.tensor(result.stall_seconds + result.write_seconds, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.setdefault("commit", []).append(took.item())
        save_beside_forward(times, manager, 2 * step + 1, state, forward_seconds)
        scratch = directory / f"plain-{rank}"
        timed(times, "write_fsync", lambda: write_and_sync(scratch, memoryview(warm.numpy())))  # noqa: B023
        scratch.unlink()
        newest = max((directory / "ours").glob("step-*"))
        read_fresh(newest)  # into the page cache, for both
        timed(times, "read", lambda: read_fresh(newest))  # noqa: B023
        timed(times, "restore", lambda: manager.restore(state))
        measure_dcp(times, directory, state, own, rank)
        timed(times, "torch_save", lambda: torch_save(directory / "torch.pt", state, rank))
    manager.close()
    return times


def measure_dcp(times: Times, directory: Path, state: Any, own: Any, rank: int) -> None:
    path = directory / "dcp"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    timed(times, "dcp_save", lambda: dcp.save(state, checkpoint_id=path))
    timed(times, "dcp_load", lambda: dcp.load(state, checkpoint_id=path))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    timed(times, "dcp_async_stall", lambda: dcp.async_save(state, checkpoint_id=path, process_group=own)).result()


def measure_transfer(rank: int, world_size: int, store: dist.Store, base: Path, megabytes: int, repeats: int) -> Times:
    """Two nodes with disks of their own; the second one comes new each time and is sent the state."""
    times: Times = {}
    state, directory = make_state(megabytes), base / f"node{rank}"
    for repeat in range(repeats + 1):
        manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store)
        if repeat == 0:
            manager.save(1, state)
            manager.wait()
        timed(times, "own_disks", lambda: manager.restore(state))  # noqa: B023
        manager.close()
        if rank == 1:
            shutil.rmtree(directory)
        manager = CheckpointManager(directory, rank=rank, world_size=world_size, store=store)
        timed(times, "newcomer", lambda: manager.restore(state))  # noqa: B023
        manager.close()
    return times


def report_transfer(base: Path, megabytes: int, repeats: int) -> None:
    times = run_ranks(2, measure_transfer, base, megabytes, repeats, process_group=True, timeout_seconds=300)[0]
    own, newcomer = (statistics.median(times[name][1:]) for name in ("own_disks", "newcomer"))
    speed = megabytes / (newcomer - own)
    print(
        f"\n  restore of {megabytes} MB: {own:.3f} s from own disks, {newcomer:.3f} s with a newcomer that is sent it,"
    )
    print(f"  keeps a copy and loads that: {speed:.0f} MB/s from peer to durable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1056, help="size of the whole state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forward-seconds", type=float, default=0.5, help="how long a forward takes that hides a copy")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="a directory on the disk to measure")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="bench-checkpoints-", dir=arguments.directory))
    try:
        times = run_ranks(
            2,
            measure,
            base,
            arguments.megabytes,
            arguments.repeats,
            arguments.forward_seconds,
            process_group=True,
            timeout_seconds=900,
        )[0]
        report_transfer(base / "transfer", 200, arguments.repeats)
    finally:
        shutil.rmtree(base)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first one warms up
    print(f"\n{arguments.megabytes} MB, 2 ranks, median of {arguments.repeats}, seconds (least - most)")
    for name, values in times.items():
        print(f"  {name:16} {medians[name]:8.3f}   ({min(values[1:]):.3f} - {max(values[1:]):.3f})")
    print(f"\n  {'ours':14} {'against':28} {'ratio':>6}  {'goal':>5}")
    for ours, ours_key, other, other_key, goal in GOALS:
        ratio = medians[ours_key] / medians[other_key]
        verdict = "met" if ratio <= goal else "missed"
        print(f"  {ours:14} {other:28} {ratio:6.2f}  {goal:5.2f}  {verdict}")


if __name__ == "__main__":
    main()
