"""States to save, comparison down to the bit, and a storage that fails or dies at its n-th operation."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoints.held import Whole, held_in
from checkpoints.load import load
from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier
from checkpoints.restore import Restored
from checkpoints.slot import Mark
from checkpoints.storage import LocalStorage


def small_state(seed: int) -> dict[str, Any]:
    """A state of a few kilobytes with every kind of leaf, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = draw(16, 8)
    return {
        "model": {"weight": weight, "tied": weight, "bias": draw(16).bfloat16(), "empty": torch.zeros(0, 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(seed)), "exp_avg": draw(16, 8)}}, "lr": [0.1, 1e-30]},
        "extra": {"tuple": (1, None, True, "x"), "bytes": b"\x00\xff", "inf": math.inf, "seed": seed},
    }


def cut_state(seed: int) -> dict[str, Any]:
    """A state whose tensors are large enough to be cut over ranks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(300, 401, generator=generator),
        "narrow": torch.randn(70_001, generator=generator).to(torch.float16),
        "flags": torch.randn(66_001, generator=generator) > 0,
        "transposed": torch.randn(200, 301, generator=generator).t(),
        "count": torch.tensor(seed),
    }


def assert_same(left: Any, right: Any, path: str = "state") -> None:
    """Equal in structure, type and bits; a Parameter equals its data, a dict of any kind a dict."""
    if isinstance(right, torch.Tensor):
        assert isinstance(left, torch.Tensor), path
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        as_bytes = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
        assert torch.equal(*as_bytes), path
        return
    assert type(left) is type(right), (path, type(left), type(right))
    if isinstance(right, dict):
        assert list(left) == list(right), path
        for key in right:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(right, (list, tuple)):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    elif isinstance(right, float):
        assert repr(left) == repr(right), path
    else:
        assert left == right, path


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def newest(directory: Path) -> Path:
    return max(directory.glob("step-*"))


def fail_with(code: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyStorage(LocalStorage):
    """Acts at its n-th operation that changes something, counted from `arm`; a write has then put down half its bytes.

    With `forever` every later operation acts as well, as on a full disk.
    """

    def __init__(self, act: Callable[[], None], forever: bool = False) -> None:
        self.operations: list[str] = []
        self._act, self._forever = act, forever
        self._left: int | None = None

    def arm(self, number: int) -> None:
        """Act at operation `number`, the next one being number 0."""
        self.operations.clear()
        self._left = number

    def disarm(self) -> None:
        self._left = None

    def _count(self, name: str) -> bool:
        self.operations.append(name)
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0 if self._forever else self._left == -1

    def _guard(self, name: str) -> None:
        if self._count(name):
            self._act()

    def make_directory(self, path: str) -> None:
        self._guard(f"make_directory {path}")
        super().make_directory(path)

    def write(self, path: str, data: memoryview | bytes, observe: Any = None) -> None:
        if self._count(f"write {path}"):
            super().write(path, memoryview(data)[: len(data) // 2], observe)
            self._act()
        super().write(path, data, observe)
        self._guard(f"written {path}")

    def rename(self, source: str, target: str) -> None:
        self._guard(f"rename {source}")
        super().rename(source, target)

    def swap(self, first: str, second: str) -> bool:
        self._guard(f"swap {first}")
        return super().swap(first, second)

    def sync_directory(self, path: str) -> None:
        self._guard(f"sync_directory {path}")
        super().sync_directory(path)

    def remove_tree(self, path: str) -> None:
        if self._count(f"remove_tree {path}"):
            for name in self.names(path)[:1]:
                super().remove(self.join(path, name))
            self._act()
        super().remove_tree(path)

    def remove(self, path: str) -> None:
        self._guard(f"remove {path}")
        super().remove(path)


def loaded(whole: Whole) -> Any:
    """The state that lies whole in memory."""
    held = whole.open()
    return load(held.files, held.path, held.manifest)


def mark(step: int) -> Mark:
    """Of a step of the first round of two ranks."""
    return Mark(
        run_id="", incarnation="", round=1, base_step=0, step=step, samples=0, fingerprint="", world_size=2,
        nonce="n", unix_time=0.0,
    )  # fmt: skip


def manager_of(
    directory: Path | None,
    folder: Path,
    *,
    rank: int = 0,
    world: int = 1,
    store: Any = None,
    nodes: int = 1,
    **more: Any,
) -> CheckpointManager:
    """Ranks are dealt to nodes of equal size, each with a folder of its own."""
    local = world // nodes
    tier = MemoryTier(folder / f"node{rank // local}", local_rank=rank % local, local_world_size=local)
    return CheckpointManager(directory, rank=rank, world_size=world, store=store, memory=tier, **more)


def restored_by(manager: CheckpointManager, **more: Any) -> Restored:
    restored = manager.restore(**more)
    assert restored is not None
    return restored


def slots_by_step(folder: Path) -> dict[int, Path]:
    """One share of each step that is whole in the folder."""
    return {whole.mark.step: whole.shares[0].path for whole in held_in(folder, "")}


def round_trip(directory: Path, state: Any) -> Any:
    manager = CheckpointManager(directory)
    manager.save(1, state)
    result = manager.wait()
    assert result is not None
    assert result.state == "committed", result.error
    restored = manager.restore()
    manager.close()
    assert restored is not None
    return restored.state


def in_child(action: Callable[[], object]) -> int:
    """How a forked child ended, as waitpid says."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]
