"""The memory tier killed at any instant: one of two steps is whole."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from checkpoints.held import held_in
from checkpoints.memory import MemoryTier
from tests.checkpoints.support import assert_same, cut_state, in_child, loaded, mark


def tiers(folder: Path) -> list[MemoryTier]:
    return [MemoryTier(folder, local_rank=rank, local_world_size=2) for rank in range(2)]


def run_steps(folder: Path, steps: Iterator[int], agreed: Callable[[int], None]) -> None:
    """Two ranks of a node in one process, in an order that the agreement between them allows."""
    ranks = tiers(folder)
    newest = max(held_in(folder, ""), key=lambda whole: whole.mark.step, default=None)
    for tier in ranks if newest is not None else ():
        tier.restored((1, newest.mark.step), [share.path.name for share in newest.shares])
    for step in steps:
        for tier in ranks:
            tier.settle()
        agreed(step)  # all have sealed the step before, and go on
        state = cut_state(step % 7)
        steady = frozenset(tensor.data_ptr() for tensor in state.values() if step % 3)  # copied beside the steps
        for tier in ranks if step % 2 else reversed(ranks):
            tier.keep(state, mark(step), reading=False, steady=steady)
    for tier in ranks:
        tier.settle()


def check_whole(folder: Path, agreed: int) -> None:
    """What a kill after that agreement has left: the step before, or already the one that was agreed on."""
    newest = max(held_in(folder, ""), key=lambda whole: whole.mark.step, default=None)
    if newest is None:
        assert agreed <= 1, f"nothing is whole after the agreement on step {agreed}"
        return
    assert newest.mark.step in (agreed - 1, agreed)
    assert_same(loaded(newest), cut_state(newest.mark.step % 7))


@pytest.mark.slow
def test_killed_at_every_line_of_a_step_one_of_two_steps_is_whole(tmp_path: Path) -> None:
    """SIGKILL before the n-th line that the tier's modules run, on either thread, for each n of two steps."""
    lines = 0
    for number in itertools.count():
        folder, progress = tmp_path / str(number), tmp_path / f"agreed-{number}"

        def die_at(number: int = number, folder: Path = folder, progress: Path = progress) -> None:
            count = itertools.count()

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                if not frame.f_code.co_filename.endswith(
                    ("checkpoints/memory.py", "checkpoints/slot.py", "checkpoints/image.py")
                ):
                    return None
                if event == "line" and next(count) == number * 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return trace

            def agreed(step: int) -> None:
                progress.write_text(str(step))
                if step == 3:  # two whole steps lie there by now
                    threading.settrace(trace)
                    sys.settrace(trace)

            torch.set_num_threads(1)
            run_steps(folder, iter(range(1, 6)), agreed)
            os._exit(0)

        status = in_child(die_at)
        check_whole(folder, int(progress.read_text()))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        lines += 1
    assert lines > 40


def test_killed_at_random_fifty_times_one_of_two_steps_is_whole(tmp_path: Path) -> None:
    for number in range(50):
        progress = tmp_path / "agreed"
        progress.write_text("0")

        def go_on(progress: Path = progress) -> None:
            torch.set_num_threads(1)
            first = max((whole.mark.step for whole in held_in(tmp_path / "shm", "")), default=0) + 1
            run_steps(tmp_path / "shm", itertools.count(first), lambda step: _put(progress, step))

        pid = os.fork()
        if pid == 0:
            go_on()
        while int(progress.read_text() or "0") == 0:
            pass
        threading.Event().wait(0.002 + 0.0007 * (number * 7 % 50))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check_whole(tmp_path / "shm", int(progress.read_text()))


def _put(path: Path, step: int) -> None:
    """Atomically: its reader looks at any time, and after a kill."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(step))
    fresh.replace(path)
