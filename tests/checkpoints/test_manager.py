"""CheckpointManager as a program uses it, alone and on several ranks."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import catalog
from checkpoints.background import CommitResult
from checkpoints.errors import (
    CheckpointError,
    CheckpointMismatchError,
    FingerprintError,
    StaleRoundError,
    UnsupportedStateError,
)
from checkpoints.manager import CheckpointManager
from tests.checkpoints.support import assert_same, cut_state, round_trip, small_state

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def test_nothing_to_restore_and_nothing_saved_is_none(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "new" / "directory")
    assert manager.restore() is None
    assert manager.wait() is None
    assert not manager.busy
    manager.close()


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    state = small_state(3)
    restored = round_trip(tmp_path, state)
    assert_same(restored, state)
    assert restored["model"]["tied"] is restored["model"]["weight"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 255, (4096 * 16,), dtype=torch.uint8)
    values = raw.view(dtype)
    assert_same(round_trip(tmp_path, {"v": values, "zero": values[:0], "scalar": values[0]}), {
        "v": values, "zero": values[:0], "scalar": values[0]
    })  # fmt: skip


def test_views_of_every_kind_come_back(tmp_path: Path) -> None:
    base = torch.arange(400_000, dtype=torch.float32).view(500, 800)
    complex_ = torch.randn(40, 30, dtype=torch.complex64)
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1, 5).expand(7, 5),
        "conjugate": complex_.conj(),
        "negative": complex_.conj().imag,
        "parameter": torch.nn.Parameter(base.clone()),
        "overlapping": [base[:300], base[200:]],
    }
    assert_same(round_trip(tmp_path, state), {**state, "conjugate": complex_.conj().resolve_conj()})


def test_live_state_may_change_once_save_returned(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2_000_000)}
    manager = CheckpointManager(tmp_path)
    for step in range(1, 4):
        state["w"].fill_(step)
        manager.save(step, state)
    state["w"].fill_(99)
    manager.wait()
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert restored.step == 3
    assert restored.state["w"].eq(3).all()


def test_result_is_told_on_the_background_thread_and_by_wait(tmp_path: Path) -> None:
    told: list[tuple[str, CommitResult]] = []
    manager = CheckpointManager(tmp_path, on_result=lambda r: told.append((threading.current_thread().name, r)))
    staged = manager.save(5, small_state(1), samples=40)
    result = manager.wait()
    manager.close()
    assert result is not None
    assert told == [("checkpoint-commit", result)]
    assert (result.step, result.state, result.error, result.bytes) == (5, "committed", None, staged.bytes)
    assert result.stall_seconds == staged.stall_seconds


def test_error_in_the_callers_on_result_does_not_stop_saving(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, on_result=lambda result: 1 / 0)  # type: ignore[arg-type,return-value]
    for step in (1, 2):
        manager.save(step, small_state(step))
    result = manager.wait()
    manager.close()
    assert result is not None
    assert (result.step, result.state) == (2, "committed")


def test_close_waits_for_the_commit_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    manager = CheckpointManager(tmp_path)
    manager.save(1, cut_state(1))
    manager.close()
    assert not [t for t in threading.enumerate() if t not in before and t.name.startswith("checkpoint-")]
    assert [entry["state"] for entry in catalog.verify(tmp_path)] == ["committed"]


def test_closed_manager_says_so_and_may_be_closed_again(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(1, small_state(1))


def test_retention_keeps_the_last_and_every_nth(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        manager.save(step, small_state(step))
    manager.close()
    assert [entry["step"] for entry in catalog.list_checkpoints(tmp_path)] == [4, 8, 9, 10]


def test_unsupported_state_is_refused_before_anything_is_written_and_the_next_save_works(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\]\['b'\]"):
        manager.save(1, {"a": {"b": object()}})
    result = manager.wait()
    assert result is not None
    assert result.state == "failed"
    assert not list(tmp_path.glob("*step-*"))
    manager.save(1, small_state(1))
    manager.close()
    assert [entry["state"] for entry in catalog.verify(tmp_path)] == ["committed"]


def test_round_is_the_next_free_one_and_base_step_is_what_was_restored(tmp_path: Path) -> None:
    for round_ in (1, 2, 3):
        manager = CheckpointManager(tmp_path)
        assert manager.round == round_
        manager.restore()
        manager.save(round_ * 10, small_state(round_))
        manager.close()
    entries = [(e["round"], e["base_step"], e["step"]) for e in catalog.list_checkpoints(tmp_path)]
    assert entries == [(1, 0, 10), (2, 10, 20), (3, 20, 30)]
    assert catalog.highest_round(tmp_path) == 3


def test_round_that_never_committed_still_counts(tmp_path: Path) -> None:
    for round_ in (1, 2):
        manager = CheckpointManager(tmp_path)
        assert manager.round == round_
        manager.restore()
        manager.close()


def test_round_of_another_incarnation_is_refused_by_name(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, round=4, incarnation="first")
    manager.save(10, small_state(1))
    manager.close()
    with pytest.raises(StaleRoundError, match=r"round 4 of incarnation 'second'.*incarnation 'first'.*above 4"):
        CheckpointManager(tmp_path, round=4, incarnation="second")
    with pytest.raises(StaleRoundError):
        CheckpointManager(tmp_path, round=3, incarnation="first")
    CheckpointManager(tmp_path, round=4, incarnation="first").close()
    later = CheckpointManager(tmp_path, round=6, incarnation="first")
    later.restore()  # has begun, and committed nothing yet
    later.close()
    with pytest.raises(StaleRoundError, match=r"round 6 has started there"):
        CheckpointManager(tmp_path, round=5, incarnation="first")
    CheckpointManager(tmp_path, round=7, incarnation="second").close()


def test_same_step_of_the_same_round_stays_and_the_second_copy_is_dropped(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for _ in range(2):
        manager.save(10, small_state(1))
        result = manager.wait()
        assert result is not None
        assert result.state == "committed"
    manager.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rounds.json", "step-000000000010"]


def test_fingerprint_of_other_data_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, small_state(1), fingerprint="books")
    with pytest.raises(FingerprintError, match=r"books.*films"):
        manager.restore(fingerprint="films")
    assert manager.restore(fingerprint="books") is not None
    assert manager.restore() is not None
    manager.close()


def test_tensors_that_do_not_fit_are_all_listed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, "other": torch.ones(1)})
    manager.wait()
    live = {"model": {"a": torch.ones(2).bfloat16(), "b": torch.ones(3, 1), "d": torch.ones(4)}}
    with pytest.raises(CheckpointMismatchError) as caught:
        manager.restore(live)
    message = str(caught.value)
    for part in (
        "missing in the checkpoint: model/d",
        "only in the checkpoint: model/c",
        "model/a (float32 [2] in the checkpoint, bfloat16 [2] live)",
        "model/b (float32 [3] in the checkpoint, float32 [3, 1] live)",
    ):
        assert part in message
    assert "other," not in message and "other;" not in message and "other." not in message
    assert manager.restore({"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}}) is not None
    manager.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2 and world_size 2"),
        ({"world_size": 2}, "several ranks need store="),
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"commit_timeout_seconds": 0}, "commit_timeout_seconds is 0"),
    ],
)
def test_contradictory_arguments_are_refused_by_value(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointManager(tmp_path, **arguments)


@pytest.mark.parametrize("left", [0.0, 0.3])
def test_nothing_is_published_when_the_lease_may_end(tmp_path: Path, left: float) -> None:
    manager = CheckpointManager(tmp_path, fence=lambda: left, commit_timeout_seconds=1)
    manager.save(1, small_state(1))
    result = manager.wait()
    manager.close()
    assert result is not None
    assert result.state == "failed"
    assert "lease" in str(result.error)
    assert not list(tmp_path.glob("*step-*"))


def test_renewal_that_comes_in_time_lets_the_commit_through(tmp_path: Path) -> None:
    answers = iter([0.2, 0.2])
    manager = CheckpointManager(tmp_path, fence=lambda: next(answers, 4.0))
    manager.save(1, small_state(1))
    result = manager.wait()
    manager.close()
    assert result is not None
    assert result.state == "committed"


def test_saved_infinity_in_samples_of_lists_keeps_type(tmp_path: Path) -> None:
    assert_same(round_trip(tmp_path, {"a": [math.nan, 1, 1.0]}), {"a": [math.nan, 1, 1.0]})
