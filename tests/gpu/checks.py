"""What touches CUDA, checked on one GPU: each check in a process of its own, with a time limit; see `run.sh`.

A check returns its figures and raises AssertionError. With `--device cpu` they run without a GPU, to check the checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpoints.manager import CheckpointManager
from elastic.training.comms import CommTotals, GradientComms
from elastic.training.environment import read_environment
from elastic.training.memory_meter import MemoryMeter
from elastic.training.session import Session
from elastic.training.trainer import Trainer, TrainerConfig
from tests.support.job import running
from tests.support.ranks import run_ranks
from tests.training.worlds import SentenceTask

Figures = dict[str, Any]
Check = Callable[[torch.device, int], Figures]
CHECKS: dict[str, Check] = {}
LIMIT_SECONDS = 240
WIDTH = 512
SCRIPT = str(Path(__file__).parents[1] / "support" / "training_script.py")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def alone() -> Session:
    """The session of a script without agent: a world of one, over NCCL on a GPU."""
    return Session(read_environment({}))


def seconds(device: torch.device, action: Callable[[], Any]) -> float:
    """Wall time of an action with all that it has queued on the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - began


@check
def overflow(device: torch.device, _megabytes: int) -> Figures:
    """fp16: an inf in the middle of an accumulation skips one step and halves the scale once."""

    class Overflowing(SentenceTask):
        asked = 0

        def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
            self.asked += 1
            total, weight = super().loss(model, batch)
            return total * (float("inf") if self.asked == 8 else 1.0), weight

        def on_step(self, step: Any) -> None:
            self.steps.append(step)

    task = Overflowing()
    config = TrainerConfig(global_batch_size=12, micro_batch_size=4, steps=5, precision="fp16", device=device.type)
    trainer = Trainer(task, config, session=alone())
    trainer.run()
    scale = (trainer._stepper.state() or {})["scale"]
    skipped = [step.step for step in task.steps if not step.applied]
    assert skipped == [3], skipped
    assert scale == 65536.0 / 2, scale
    return {"skipped steps": skipped, "scale": scale}


@check
def memory(device: torch.device, megabytes: int) -> Figures:
    """The kinds of memory are those of the tensors counted by hand, and the allocator's figures those of torch."""
    width = int((megabytes * 1e6 / 4) ** 0.5)
    model = torch.nn.Linear(width, width, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer, device, time.monotonic)
    model(torch.randn(8, width, device=device)).sum().backward()
    optimizer.step()
    fields = meter.fields()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    for kind, expected in (("weights", 4 * numbers), ("gradients", 4 * numbers), ("optimizer", 8 * numbers)):
        assert abs(fields[f"{kind}_bytes"] - expected) <= 0.01 * expected, (kind, fields, expected)
    figures: Figures = {"MB counted by hand": round(16 * numbers / 1e6)}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        assert fields["allocated_bytes"] == stats["allocated_bytes.all.current"], fields
        assert fields["reserved_bytes"] == stats["reserved_bytes.all.current"], fields
        figures["MB allocated"] = round(fields["allocated_bytes"] / 1e6)
    return figures


def communicate(rank: int, world_size: int, _store: Any, kind: str, micro_steps: int) -> CommTotals:
    """One rank's DDP with our hook over the default process group: ten steps of so many micro-steps."""
    device = torch.device(kind)
    torch.manual_seed(rank)
    config = TrainerConfig(global_batch_size=world_size * micro_steps, micro_batch_size=1, steps=1)
    comms = GradientComms(config, world_size=world_size, device=device, on_compute_end=lambda: None)
    model = DistributedDataParallel(
        torch.nn.Linear(WIDTH, WIDTH, device=device), broadcast_buffers=False, gradient_as_bucket_view=True
    )
    comms.attach(model)
    for _ in range(10):
        comms.step_began(micro_steps)
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.randn(32, WIDTH, device=device)).square().mean().backward()
        comms.backward_returned()
    if device.type == "cuda":
        torch.cuda.synchronize()
    totals = comms.totals()
    comms.close()
    return totals


@check
def comms(device: torch.device, _megabytes: int) -> Figures:
    """As many bytes a step as the gradients have, whatever the number of micro-steps; what is exposed is within all.

    A world of one over the device's own backend, then two gloo ranks that share the device.
    """
    figures: Figures = {}
    gradient_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    runs = {f"{backend}, one rank, {n} micro-steps": [communicate(0, 1, None, device.type, n)] for n in (1, 4)}
    dist.destroy_process_group()
    for count in (1, 4):
        ranks = run_ranks(2, communicate, device.type, count, process_group=True)
        runs[f"gloo, two ranks, {count} micro-steps"] = ranks
    for title, ranks in runs.items():
        for totals in ranks:
            assert totals.syncs == 10, totals
            assert totals.bytes == 10 * gradient_bytes, (totals, gradient_bytes)
            assert 0.0 <= totals.exposed_seconds <= totals.seconds + 1e-3, totals
        busy, exposed = (1e3 * getattr(ranks[0], name) / 10 for name in ("seconds", "exposed_seconds"))
        figures[title] = f"{gradient_bytes} B a step, {busy:.2f} ms, {exposed:.2f} ms exposed"
    return figures


@check
def staging(device: torch.device, megabytes: int) -> Figures:
    """A save stalls for about a copy to pinned memory; what is restored is what was saved, bit for bit."""
    state = {"model": {str(i): torch.randn(1 << 18, device=device) for i in range(megabytes)}}
    before = {name: tensor.cpu().clone() for name, tensor in state["model"].items()}
    source = torch.cat(list(state["model"].values()))
    warm = torch.empty(source.shape, pin_memory=device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(Path(folder) / "kept", keep_last=1)
        manager.restore()
        stalls, copies = [], []
        for step in range(1, 5):
            copies.append(seconds(device, lambda: warm.copy_(source, non_blocking=True)))
            stalls.append(seconds(device, lambda: manager.save(step, state)))  # noqa: B023
            result = manager.wait()
            assert result is not None
            assert result.state == "committed", result
        found: list[Any] = []
        restore = seconds(device, lambda: found.append(manager.restore(state)))
        manager.close()
    restored = found[0].state["model"]
    assert all(torch.equal(restored[name].cpu(), tensor) for name, tensor in before.items())
    copy, stall = min(copies), min(stalls[1:])
    return {
        "MB": megabytes,
        "copy to pinned memory": f"{copy:.4f} s",
        "stall": f"{stall:.4f} s",
        "stall / copy": round(stall / copy, 2),
        "restore": f"{restore:.3f} s",
    }


@check
def overlap(device: torch.device, megabytes: int) -> Figures:
    """A copy beside the next forward: the call and the wait after it are short, and what comes back is of its step."""
    state = {"model": {str(i): torch.randn(1 << 18, device=device) for i in range(megabytes)}}
    tensors = list(state["model"].values())
    work = torch.randn(4096 if device.type == "cuda" else 1024, device=device).expand(2048, -1).contiguous()

    def forward() -> None:
        for _ in range(200 if device.type == "cuda" else 5):
            (work @ work.t()).sum()

    alone_seconds = min(seconds(device, forward) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(Path(folder) / "kept", keep_last=1)
        manager.restore()
        calls, waits, beside = [], [], []
        for step in range(1, 5):
            expected = {name: tensor.cpu().clone() for name, tensor in state["model"].items()}
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            manager.save(step, state, steady=tensors)
            calls.append(time.perf_counter() - began)
            forward()
            waiting = time.perf_counter()
            manager.settle()
            waits.append(time.perf_counter() - waiting)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            beside.append(time.perf_counter() - began)
            torch._foreach_add_(tensors, 1.0)  # the update, right after
            result = manager.wait()
            assert result is not None
            assert result.state == "committed", result
        restored = manager.restore(state)
        manager.close()
    assert restored is not None
    assert all(torch.equal(restored.state["model"][name].cpu(), tensor) for name, tensor in expected.items())
    return {
        "MB": megabytes,
        "call": f"{min(calls[1:]):.4f} s",
        "wait": f"{min(waits[1:]):.4f} s",
        "forward": f"{alone_seconds:.4f} s, {min(beside[1:]):.4f} s with the copy beside it",
    }


def trained(device: torch.device, folder: Path, kills: int, *flags: str) -> tuple[str, list[Figures]]:
    """Digest at the end and incidents of a job whose worker is killed so often."""
    folder.mkdir()
    (folder / "slow").touch()
    incidents: list[Figures] = []
    arguments = ("--http", "127.0.0.1:0", "--nproc-per-node", "1", "--max-restarts", "9", "--memory-every", "1")
    where = ("--checkpoint-dir", str(folder / "kept"), SCRIPT, str(folder))
    warm = "--no-standby" not in flags
    with running(folder, *arguments, *flags, *where, standby=warm, environ={"TEST_DEVICE": device.type}) as job:
        for number in range(kills):
            status = job.wait_status(
                lambda s: s["workers"] and (s["workers"][0]["step"] or 0) > 2 * number + 2,  # noqa: B023
                seconds=90,
            )
            if warm:
                status = job.wait_status(lambda s: s["workers"] and s["workers"][0]["standby"], seconds=90)
            os.kill(status["workers"][0]["pid"], signal.SIGKILL)
            found = job.wait_status(lambda s: len(s["incidents"]) > number and s["incidents"][-1]["seconds"]["total"])  # noqa: B023
            incidents.append(found["incidents"][-1]["seconds"])
        (folder / "slow").unlink()
        assert job.wait(90) == 0, job.output
    return (folder / "digest").read_text(), incidents


@check
def recovery(device: torch.device, _megabytes: int) -> Figures:
    """Killed twice with a warm standby, once with none: the end is bit-equal to that of a run without kills."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        straight, _ = trained(device, folder / "straight", 0, "--no-standby")
        warm, incidents = trained(device, folder / "warm", 2)
        cold, slow = trained(device, folder / "cold", 1, "--no-standby")
        context, primed = trained(device, folder / "context", 1, "--preload", "tests.gpu.context")
    assert warm == cold == context == straight, (warm, cold, context, straight)
    return {
        "warm": incidents[-1],
        "cold": slow[-1]["total"],
        "warm, with a CUDA context": primed[-1]["total"],
    }


def one(name: str, device: str, megabytes: int) -> int:
    """The process of one check: its figures on the last line."""
    try:
        figures = CHECKS[name](torch.device(device), megabytes)
    except Exception:  # noqa: BLE001 - the top of a process
        print(traceback.format_exc(), file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0


def _run(command: list[str]) -> tuple[bool, str, str]:
    """Whether it passed within its time, stdout and stderr; interrupted, it ends what it has started."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, trouble = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output, trouble = process.communicate(timeout=60)
            return False, output, f"not within {LIMIT_SECONDS} s\n{trouble}"
        return process.returncode == 0, output, trouble


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the state that is staged")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    options = parser.parse_args()
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if options.one:
        return one(options.checks[0], options.device, options.megabytes)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here")
        return 0
    failed = 0
    for name in options.checks or CHECKS:
        began = time.monotonic()
        flags = ["--one", name, "--device", options.device, "--megabytes", str(options.megabytes)]
        passed, output, trouble = _run([sys.executable, "-m", "tests.gpu.checks", *flags])
        failed += not passed
        print(f"{'pass' if passed else 'FAIL'}  {name} ({time.monotonic() - began:.1f} s)", flush=True)
        if not passed:
            print(trouble[-3000:])
        for title, figure in json.loads(output.splitlines()[-1]).items() if passed else ():
            print(f"      {title}: {figure}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
