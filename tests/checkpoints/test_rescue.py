"""What memory alone holds is committed by its owner: whole and bit by bit, once, where the job was; or not at all."""

from __future__ import annotations

import itertools
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints import catalog, rescue
from checkpoints import manager as managers
from checkpoints.errors import CheckpointError, ForeignDirectoryError, StaleRoundError
from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier
from checkpoints.rescue import Saved
from checkpoints.rounds import read_record
from checkpoints.storage import LocalStorage
from tests.checkpoints.support import (
    FaultyStorage,
    assert_same,
    cut_state,
    die,
    fail_with,
    flip_byte,
    in_child,
    small_state,
)
from tests.support.ranks import run_ranks


def kept(disk: Path | str, folder: Path, steps: range, *, save: int = 0, **more: Any) -> None:
    """A job of one rank that kept these steps, and saved one of them, until it was over."""
    manager = CheckpointManager(disk, memory=MemoryTier(folder), **{"run_id": "job", "incarnation": "i", **more})
    manager.restore()
    for step in steps:
        if step == save:
            manager.save(step, small_state(step), samples=10 * step)
        else:
            assert manager.keep(step, small_state(step), samples=10 * step) is not None
    manager.close()


def saved(folder: Path | None, disk: Path | str, **more: Any) -> Saved:
    found = rescue.rescue(folder, disk, "job", **more)
    assert found is not None
    return found


def committed(disk: Path | str) -> list[int]:
    return [entry["step"] for entry in catalog.verify(disk) if entry["state"] == "committed"]


def assert_restores(disk: Path | str, step: int) -> None:
    """A later round goes on from that step as the directory has it."""
    manager = CheckpointManager(disk, run_id="job", incarnation="later")
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert (restored.step, restored.samples, restored.tier) == (step, 10 * step, "disk")
    assert_same(restored.state, small_state(step))


def test_the_newest_step_is_committed_and_the_next_start_goes_on_from_it(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 8), save=3)
    rescued = saved(memory, disk)
    assert rescued == Saved(step=7, path=str(disk / "step-000000000007"), is_new=True)
    assert committed(disk) == [3, 7]
    assert saved(memory, disk) == Saved(step=7, path=rescued.path)  # there is nothing newer any more
    assert saved(None, disk) == Saved(step=7, path=rescued.path)
    assert not list(disk.glob(".*"))
    assert_restores(disk, 7)


def test_a_step_that_a_later_round_restored_and_never_passed_is_committed(tmp_path: Path) -> None:
    """The workers failed at the same step in every round: the newest one is of the first."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 5), save=2, round=4)
    for round_ in (5, 6):
        kept(disk, memory, range(0), round=round_)
    assert saved(memory, disk).step == 4
    assert_restores(disk, 4)


def test_the_directory_that_has_the_step_is_left_alone(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 4), save=3)
    assert saved(memory, disk) == Saved(step=3, path=str(disk / "step-000000000003"))
    assert rescue.rescue(memory, disk, "another job") is None
    assert committed(disk) == [3]


def keep_on_two_nodes(rank: int, world_size: int, store: Any, folder: Path) -> None:
    tier = MemoryTier(folder / f"node{rank // 2}", local_rank=rank % 2, local_world_size=2)
    manager = CheckpointManager(
        folder / "disk", rank=rank, world_size=world_size, store=store, memory=tier, run_id="job"
    )
    manager.restore()
    for step in range(1, 6):
        assert manager.keep(step, cut_state(step)) is not None
        manager.settle()
    manager.close()


def test_of_two_nodes_that_share_the_directory_one_saves_what_its_ranks_have(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    run_ranks(4, keep_on_two_nodes, tmp_path)
    with ThreadPoolExecutor(2) as nodes:
        at_once = [nodes.submit(saved, tmp_path / f"node{node}", disk) for node in range(2)]
    assert {future.result().step for future in at_once} == {5}
    assert sorted(future.result().is_new for future in at_once) == [False, True]
    assert [entry["step"] for entry in catalog.verify(disk)] == [5]
    assert len(list((disk / "step-000000000005").glob("shard-*-of-00002.safetensors"))) == 2
    manager = CheckpointManager(disk, run_id="job")
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert_same(restored.state, cut_state(5))


def begun_by_another(disk: Path) -> Path:
    """The directory of a node that has begun to save step 2."""
    working = disk / ".writing-step-000000000002-r1-rescued0"
    working.mkdir()
    (working / "shard").write_bytes(b"x")
    return working


def test_a_node_that_died_over_it_is_waited_for_only_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 3), round=1)
    begun_by_another(disk)
    with pytest.raises(CheckpointError, match="another node has not finished saving step 2"):
        rescue.rescue(memory, disk, "job", patience_seconds=0.3)
    monkeypatch.setattr(rescue, "_SILENT_SECONDS", 0.5)
    assert saved(memory, disk, patience_seconds=30.0).is_new
    assert_restores(disk, 2)


def test_who_is_alone_waits_for_nobody(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 3), round=1)
    begun_by_another(disk)
    assert saved(memory, disk, is_alone=True, patience_seconds=0.0).is_new
    assert_restores(disk, 2)
    assert not list(disk.glob(".writing*")), "what a try of a dead one has left is cleared away"


def test_room_that_a_dead_try_has_taken_is_had_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 3), round=1)
    working, made = begun_by_another(disk), []
    monkeypatch.setattr(rescue._Commit, "run", lambda commit: made.append(commit.working) or working.exists())
    assert saved(memory, disk, is_alone=True).is_new
    assert made == [str(working)], "the same again, and nothing beside it"


def test_a_directory_that_has_more_but_is_another_jobs_leaves_memory_alone(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 4), save=2)
    disk.rename(tmp_path / "away")
    for round_ in (1, 2):
        kept(disk, tmp_path / f"other-{round_}", range(round_, round_ + 2), save=round_, run_id="other", round=round_)
    with pytest.raises(ForeignDirectoryError, match="is in round 2 of 'other/i', this is of 'job/i'"):
        rescue.rescue(memory, disk, "job")
    shutil.rmtree(disk)
    (tmp_path / "away").rename(disk)
    assert saved(memory, disk) == Saved(step=3, path=str(disk / "step-000000000003"), is_new=True)


def test_a_node_that_gets_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 3), round=1)
    monkeypatch.setattr(rescue, "_SILENT_SECONDS", 0.5)
    shard, stop = begun_by_another(disk) / "shard", threading.Event()

    def write_on() -> None:
        while not stop.wait(0.05):
            with shard.open("ab") as file:
                file.write(b"x")

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        with pytest.raises(CheckpointError, match="another node has not finished"):
            rescue.rescue(memory, disk, "job", patience_seconds=2.0)
    finally:
        stop.set()
        writer.join()


def test_a_damaged_step_gives_way_to_the_one_before(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 6))
    (newest,) = [path for path in memory.glob("rank-0-slot-*") if b'"step": 5' in path.read_bytes()[:8192]]
    flip_byte(newest, newest.stat().st_size // 2)
    step = saved(memory, disk).step
    assert step in (4, 5)  # what was hit may lie beyond the image
    flip_byte(newest, 4096 + newest.read_bytes()[4096:].index(b"mark"))
    shutil.rmtree(disk)
    kept(disk, tmp_path / "other", range(0))
    assert saved(memory, disk).step == 4
    assert_restores(disk, 4)


def test_a_job_that_has_gone_on_elsewhere_is_not_disturbed(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 4), round=2)
    kept(disk, tmp_path / "elsewhere", range(1, 3), save=2, round=3)
    assert saved(memory, disk) == Saved(step=2, path=str(disk / "step-000000000002"))  # void: round 3 began below
    kept(disk, memory, range(3, 5), round=4)
    shutil.copytree(memory, tmp_path / "peer")  # has the same step, and goes on from it
    kept(disk, tmp_path / "peer", range(0), round=5)
    before = sorted(disk.iterdir())
    with pytest.raises(StaleRoundError, match="round 5 has begun"):
        rescue.rescue(memory, disk, "job")
    assert sorted(disk.iterdir()) == before


def test_a_round_that_could_not_be_put_on_record_is_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full when the second incarnation began."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, tmp_path / "first", range(1, 6), save=5)
    storage = FaultyStorage(fail_with(28), forever=True)
    with monkeypatch.context() as patched:
        patched.setattr(managers, "open_storage", lambda directory: (storage, str(directory)))
        storage.arm(0)
        kept(disk, memory, range(6, 9), round=2, incarnation="second")
    record = read_record(LocalStorage(), str(disk))
    assert record is not None
    assert record.owner == (1, "job/i")
    assert saved(memory, disk).step == 8
    record = read_record(LocalStorage(), str(disk))
    assert record is not None
    assert (record.rounds, record.owner) == (((1, 0), (2, 5)), (2, "job/second"))
    assert_restores(disk, 8)


def test_another_job_that_has_begun_in_the_emptied_directory_keeps_all_it_has(tmp_path: Path) -> None:
    """Its rounds count from the beginning, and are lower than the ones that memory knows."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    for round_ in (1, 2, 3):
        kept(disk, memory, range(round_, round_ + 2), round=round_)
    late = CheckpointManager(disk, run_id="job", incarnation="i", round=4)
    late.restore()
    shutil.rmtree(disk)
    newer = CheckpointManager(disk, run_id="newer", incarnation="j", round=1)
    newer.restore()
    newer.save(2, small_state(2))
    newer.wait()
    with pytest.raises(CheckpointError, match="is in round 1 of 'newer/j'") as told:
        rescue.rescue(memory, disk, "job")
    assert not isinstance(told.value, StaleRoundError), "the directory may be put back"
    shutil.rmtree(memory)  # that has not seen the directory
    kept(disk.with_name("away"), memory, range(1, 5), round=5)
    with pytest.raises(CheckpointError, match="is in round 1 of 'newer/j', this is of 'job/i'"):
        rescue.rescue(memory, disk, "job")
    late.save(9, small_state(9))
    result = late.wait()
    assert result is not None
    assert "was in round 4 and is in round 1" in (result.error or "")
    assert committed(disk) == [2]
    newer.close()
    late.close()


def test_nothing_is_written_to_a_directory_that_is_not_the_jobs_any_more(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 4))
    shutil.rmtree(disk)
    disk.mkdir()
    with pytest.raises(CheckpointError, match="unmounted, replaced or emptied"):
        rescue.rescue(memory, disk, "job")
    assert not list(disk.iterdir())


def test_on_an_object_store_the_first_node_does_it(tmp_path: Path) -> None:
    url, memory = f"memory://{tmp_path}/store", tmp_path / "memory"
    kept(url, memory, range(1, 4), save=1)
    assert saved(memory, url, is_first=False).step == 1
    assert saved(memory, url).step == 3
    assert committed(url) == [1, 3]
    assert_restores(url, 3)


@pytest.mark.parametrize("ends", ["fails", "is killed"])
def test_whatever_operation_fails_the_directory_has_the_old_step_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    storage = FaultyStorage(fail_with(28) if ends == "fails" else die)
    monkeypatch.setattr(rescue, "open_storage", lambda directory: (storage, str(directory)))
    for number in itertools.count():
        disk, memory = tmp_path / f"disk{number}", tmp_path / f"memory{number}"
        kept(disk, memory, range(1, 5), save=2)
        storage.arm(number)
        if ends == "fails":
            over = _fails(memory, disk)
        else:
            over = in_child(lambda m=memory, d=disk: rescue.rescue(m, d, "job")) != signal.SIGKILL  # type: ignore[misc]
        storage.disarm()
        assert committed(disk) in ([2], [2, 4])
        assert_restores(disk, committed(disk)[-1])
        if over:
            break
    assert number > 5
    assert committed(disk) == [2, 4]


def _fails(memory: Path, disk: Path) -> bool:
    """Whether it was committed without an error."""
    try:
        rescue.rescue(memory, disk, "job")
    except OSError:
        return False
    return True


def test_numbers_that_python_calls_equal_stay_what_they_are(tmp_path: Path) -> None:
    """Kept one after another under the same names."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    manager = CheckpointManager(disk, memory=MemoryTier(memory), run_id="job", incarnation="i")
    manager.restore()
    for step, number in enumerate((True, 1, 1.0, 0.0, -0.0), start=1):
        assert manager.keep(step, {"number": number}) is not None
        manager.settle()
        restored = manager.restore()
        assert restored is not None
        assert repr(restored.state["number"]) == repr(number)
    manager.close()


def test_who_is_cleared_away_while_it_lives_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    kept(disk, memory, range(1, 3), round=1)
    write = rescue._Commit._write

    def overtaken(commit: rescue._Commit) -> Any:
        manifest = write(commit)
        monkeypatch.setattr(rescue._Commit, "_write", write)
        assert saved(memory, disk, is_alone=True).is_new
        return manifest

    monkeypatch.setattr(rescue._Commit, "_write", overtaken)
    assert saved(memory, disk).step == 2
    assert committed(disk) == [2]
    assert not list(disk.glob(".*-*"))
    assert_restores(disk, 2)
