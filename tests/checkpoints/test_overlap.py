"""Copies that go on beside training: what comes back is the state of its step, or it does not come back at all."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import image
from checkpoints.errors import DisturbedError
from checkpoints.held import held_in
from checkpoints.image import Copying
from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier
from tests.checkpoints.support import assert_same
from tests.support.job import wait_for
from tests.support.ranks import run_ranks


class Gate:
    """Holds up every copy that goes on beside training until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, run = threading.Event(), Copying.run

        def held(copying: Copying) -> None:
            if copying.pending:
                assert self.opened.wait(20)
            run(copying)

        monkeypatch.setattr(Copying, "run", held)


def parts() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what an update changes, what a forward changes), in the forms that a state has them in."""
    torch.manual_seed(3)
    steady = {
        "large": torch.randn(300, 700),  # cut between two writers
        "transposed": torch.randn(40, 60).t(),
        "half": torch.randn(33).bfloat16(),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "step": torch.tensor(1.0),
        "empty": torch.empty(0, 3),
    }
    fickle = {"mean": torch.randn(64), "count": torch.tensor(7)}
    return steady, fickle


def state_of(steady: dict[str, torch.Tensor], fickle: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As `state_dict` gives it: other objects, the same memory."""
    return {
        "steady": {k: v.detach() for k, v in steady.items()},
        "fickle": {k: v.detach() for k, v in fickle.items()},
    }


def copy_of(state: Any) -> Any:
    return {
        part: {name: tensor.resolve_conj().clone() for name, tensor in tensors.items()}
        for part, tensors in state.items()
    }


def change(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.add_(1)


def manager_at(
    folder: Path, *, memory: bool, disk: bool = True, rank: int = 0, world: int = 1, store: Any = None
) -> CheckpointManager:
    tier = MemoryTier(folder / "shm", local_rank=rank, local_world_size=world) if memory else None
    return CheckpointManager(folder / "disk" if disk else None, rank=rank, world_size=world, store=store, memory=tier)


@pytest.mark.parametrize("memory", [True, False])
def test_a_save_returns_before_what_is_steady_is_copied_and_holds_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    gate = Gate(monkeypatch)
    steady, fickle = parts()
    manager = manager_at(tmp_path, memory=memory)
    manager.restore()
    expected = copy_of(state_of(steady, fickle))
    manager.save(1, state_of(steady, fickle), steady=steady.values())
    change(fickle)  # by a forward, while nothing of what is steady is copied
    gate.opened.set()
    manager.settle()
    change(steady)  # by an update
    result = manager.wait()
    assert result is not None
    assert result.state == "committed", result.error
    assert result.stall_seconds > 0
    manager.close()
    manager = manager_at(tmp_path, memory=False)
    restored = manager.restore()
    assert restored is not None
    assert_same(restored.state, expected)
    manager.close()


def test_what_is_kept_is_whole_once_it_is_settled_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    steady, fickle = parts()
    manager = manager_at(tmp_path, memory=True, disk=False)
    manager.restore()
    expected = copy_of(state_of(steady, fickle))
    kept = manager.keep(1, state_of(steady, fickle), steady=steady.values())
    assert kept is not None
    assert not held_in(tmp_path / "shm", "")
    gate.opened.set()
    manager.settle()
    change(steady | fickle)
    manager.close()
    manager = manager_at(tmp_path, memory=True, disk=False)
    restored = manager.restore()
    assert restored is not None
    assert_same(restored.state, expected)
    manager.close()


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("memory", [True, False])
def test_what_changes_although_it_is_steady_is_named_and_never_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool, when: str
) -> None:
    steady, fickle = parts()
    manager = manager_at(tmp_path, memory=memory)
    manager.restore()
    expected = copy_of(state_of(steady, fickle))
    manager.save(1, state_of(steady, fickle), steady=steady.values())
    manager.wait()
    change(steady)
    gate = Gate(monkeypatch)
    written, write = threading.Event(), manager._storage.write
    monkeypatch.setattr(manager._storage, "write", lambda *args: (written.wait(20), write(*args)))
    manager.save(2, state_of(steady, fickle), steady=steady.values())
    if when == "after the copy":
        gate.opened.set()
        wait_until_copied(manager)
    steady["half"].mul_(2)
    gate.opened.set()
    with pytest.raises(DisturbedError, match=r"steady/half was changed while it was copied"):
        manager.settle()
    written.set()
    result = manager.wait()
    assert result is not None
    assert (result.state, result.step) == ("failed", 2)
    assert "steady/half was changed" in (result.error or "")
    manager.close()
    manager = manager_at(tmp_path, memory=memory)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == 1
    assert_same(restored.state, expected)
    manager.save(3, state_of(steady, fickle))
    result = manager.wait()
    assert result is not None
    assert result.state == "committed", "the next one is none the worse"
    manager.close()


def wait_until_copied(manager: CheckpointManager) -> None:
    """Another thread than the one that copies comes after it."""
    copying = manager._stager._copying if manager._memory is None else manager._memory._newest[2]  # type: ignore[index]
    copying.run()


@pytest.mark.parametrize("memory", [True, False])
def test_a_copy_that_fails_is_neither_sealed_nor_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """As by a device that breaks: training hears of it where it waits for the copy."""
    steady, fickle = parts()
    manager = manager_at(tmp_path, memory=memory)
    manager.restore()
    copy = image._copy

    def fail(moves: Sequence[Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device is gone")
        copy(moves)

    monkeypatch.setattr(image, "_copy", fail)
    written = threading.Event()
    monkeypatch.setattr(manager._storage, "write", lambda *_: written.set())
    manager.save(1, state_of(steady, fickle), steady=steady.values())
    if memory:
        with pytest.raises(RuntimeError, match="the device is gone"):
            manager.settle()
    wait_for(lambda: not manager.busy, seconds=20.0, what="the commit has ended")
    result = manager._background.result
    assert result is not None
    assert result.state == "unknown"
    assert "the device is gone" in (result.error or "")
    assert not written.is_set()
    assert not held_in(tmp_path / "shm", "") if memory else True


def test_only_the_wait_for_its_own_copy_is_part_of_how_long_a_save_held_up_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady, fickle = parts()
    manager = manager_at(tmp_path, memory=True)
    manager.restore()
    written, write = threading.Event(), manager._storage.write
    monkeypatch.setattr(manager._storage, "write", lambda *args: (written.wait(20), write(*args)))
    saved = manager.save(1, state_of(steady, fickle), steady=steady.values())
    manager.settle()
    run = Copying.run
    monkeypatch.setattr(Copying, "run", lambda copying: (time.sleep(0.1 if copying._moves else 0), run(copying)))
    for step in (2, 3, 4):
        manager.keep(step, state_of(steady, fickle), steady=steady.values())
        manager.settle()
    written.set()
    result = manager.wait()
    assert result is not None
    assert saved.stall_seconds < result.stall_seconds < saved.stall_seconds + 0.1
    manager.close()


def test_a_loop_that_forgets_to_settle_hears_of_it_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steady, fickle = parts()
    manager = manager_at(tmp_path, memory=True)
    manager.restore()
    for step in range(1, 4):
        assert manager.keep(step, state_of(steady, fickle), steady=steady.values()) is not None
        change(steady)
    manager.close()
    assert caplog.text.count("was changed while it was copied: step") == 3
    manager = manager_at(tmp_path, memory=True)
    assert manager.restore() is None
    manager.close()


def test_what_was_made_in_inference_mode_is_copied_at_once(tmp_path: Path) -> None:
    """Torch does not count its changes."""
    with torch.inference_mode():
        odd = torch.ones(5)
    manager = manager_at(tmp_path, memory=True)
    manager.restore()
    manager.keep(1, {"odd": odd}, steady=[odd])
    with torch.inference_mode():
        odd.zero_()
    manager.settle()
    manager.close()
    manager = manager_at(tmp_path, memory=True)
    restored = manager.restore()
    assert restored is not None
    assert torch.equal(restored.state["odd"], torch.ones(5))
    manager.close()


def train(rank: int, world: int, store: Any, folder: Path, memory: bool, dies_at: int) -> int:
    """Steps whose state is known by their number, saved at each third and kept at the others, until one is its last."""
    manager = manager_at(folder, memory=memory, rank=rank, world=world, store=store)
    steady, fickle = parts()
    restored = manager.restore()
    began = restored.step if restored is not None else 0
    for _ in range(began):
        change(steady | fickle)
    if restored is not None:
        assert_same(restored.state, copy_of(state_of(steady, fickle)))
    for step in itertools.count(began + 1):
        manager.settle()
        change(steady)
        change(fickle)
        act: Callable[..., Any] = manager.keep if step % 3 and memory else manager.save
        act(step, state_of(steady, fickle), steady=steady.values())
        if step == dies_at:
            os._exit(9) if rank else None
            break
    manager.wait(1.0)  # its peer is gone
    return began


@pytest.mark.parametrize("memory", [True, False])
def test_ranks_that_end_in_the_middle_of_a_copy_leave_a_state_of_one_step(tmp_path: Path, memory: bool) -> None:
    began: list[int] = []
    for dies_at in (2, 5, 8):
        (first, _) = run_ranks(2, train, tmp_path, memory, dies_at, may_die=True)
        began.append(first)
    assert began[0] == 0
    assert began[1] in ((1, 2) if memory else (1,))
    assert began[1] < began[2] <= 5
