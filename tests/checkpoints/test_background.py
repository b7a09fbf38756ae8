"""The commit thread outlives whatever breaks on it, and every wait ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.background import Background, CommitResult
from checkpoints.manager import CheckpointManager
from checkpoints.storage import LocalStorage
from tests.checkpoints.support import small_state


class OddStorage(LocalStorage):
    """Raises what no file system raises: at the listing that retention begins with, or at the first directory made."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.armed = ""

    def names(self, path: str) -> list[str]:
        if self.armed == "names":
            self.armed = ""
            raise self._error
        return super().names(path)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        if self.armed == "publish" and not path.endswith("n0"):
            self.armed = "names"

    def make_directory(self, path: str) -> None:
        if self.armed == "make_directory":
            self.armed = ""
            raise self._error
        super().make_directory(path)


def save_twice(manager: CheckpointManager) -> tuple[CommitResult, CommitResult]:
    """Both results, after waits that do not run into the commit timeout."""
    results = []
    started = time.monotonic()
    for step in (1, 2):
        manager.save(step, small_state(step))
        result = manager.wait()
        assert result is not None
        assert not manager.busy
        results.append(result)
    manager.close()
    assert time.monotonic() - started < 20
    return results[0], results[1]


@pytest.mark.parametrize("error", [OverflowError("odd"), RecursionError("odd"), SystemExit(3)], ids=repr)
def test_retention_that_breaks_does_not_stop_saving(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    storage = OddStorage(error)
    manager = CheckpointManager(tmp_path, storage=storage)
    manager.restore()
    storage.armed = "publish"
    first, second = save_twice(manager)
    assert (first.step, first.state, second.step, second.state) == (1, "committed", 2, "committed")
    assert storage.armed == ""
    assert "what follows it broke" in caplog.text


@pytest.mark.parametrize("error", [OverflowError("odd"), SystemExit(3)], ids=repr)
def test_commit_that_breaks_is_unknown_and_does_not_stop_saving(tmp_path: Path, error: BaseException) -> None:
    storage = OddStorage(error)
    manager = CheckpointManager(tmp_path, storage=storage)
    manager.restore()
    storage.armed = "make_directory"
    first, second = save_twice(manager)
    assert (first.step, first.state, second.step, second.state) == (1, "unknown", 2, "committed")
    assert type(error).__name__ in str(first.error)


def test_exit_in_the_callers_on_result_does_not_stop_saving(tmp_path: Path) -> None:
    def leave(result: CommitResult) -> None:
        raise SystemExit(result.step)

    manager = CheckpointManager(tmp_path, on_result=leave)
    first, second = save_twice(manager)
    assert (first.state, second.state) == ("committed", "committed")


def fail_once(method: Callable[..., None], error: Exception) -> Callable[..., None]:
    left = [error]

    def act(*arguments: object) -> None:
        if left:
            raise left.pop()
        method(*arguments)

    return act


@pytest.mark.parametrize("name", ["_report", "_retain"])
def test_any_break_after_the_commit_leaves_its_result(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Background, name, fail_once(getattr(Background, name), ZeroDivisionError("odd")))
    first, second = save_twice(CheckpointManager(tmp_path))
    assert (first.step, first.state, second.step, second.state) == (1, "committed", 2, "committed")
