"""A directory is in one round of one job: who is not its owner commits nothing, sets nothing aside, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.background import CommitResult
from checkpoints.errors import CheckpointError, StaleRoundError
from checkpoints.manager import CheckpointManager
from checkpoints.memory import MemoryTier
from checkpoints.rounds import read_record
from checkpoints.storage import LocalStorage
from tests.checkpoints.support import assert_same, small_state
from tests.support.ranks import run_ranks


class Refusing(LocalStorage):
    """A file system that is read-only for a while."""

    is_closed = True

    def replace(self, path: str, data: bytes) -> None:
        if self.is_closed:
            raise OSError(30, "Read-only file system", path)
        super().replace(path, data)


def saved(manager: CheckpointManager, step: int) -> CommitResult:
    manager.save(step, small_state(step))
    result = manager.wait()
    assert result is not None
    return result


def committed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


@pytest.mark.parametrize("incarnations", [("first", "second"), ("", "")], ids=["jobs", "programs"])
def test_of_two_that_begin_at_the_same_time_one_has_all_its_steps_and_the_other_none(
    tmp_path: Path, incarnations: tuple[str, str]
) -> None:
    """Both have looked before either was on record."""
    one, two = (CheckpointManager(tmp_path, run_id=f"job{n}", incarnation=name) for n, name in enumerate(incarnations))
    assert one.round == two.round
    for manager in (one, two):
        manager.restore()
    winner, loser = (one, two) if incarnations[0] else (two, one)
    for step in (10, 20):
        lost = saved(loser, step)
        assert lost.state == "failed"
        assert "by another job as well" in (lost.error or "")
        assert saved(winner, step).state == "committed"
    for manager in (one, two):
        manager.close()
    assert not list(tmp_path.glob(".*"))
    assert committed(tmp_path) == ["step-000000000010", "step-000000000020"]


def test_a_job_that_comes_into_the_same_round_is_refused_once_the_first_is_on_record(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path, round=3, run_id="job", incarnation="first")
    first.restore()
    with pytest.raises(StaleRoundError, match=r"round 3 has been begun .* by another job as well"):
        CheckpointManager(tmp_path, round=3, run_id="job", incarnation="second")
    CheckpointManager(tmp_path, round=3, run_id="job", incarnation="first").close()
    first.close()


def test_a_round_that_could_not_be_recorded_is_when_it_first_commits(tmp_path: Path) -> None:
    storage = Refusing()
    manager = CheckpointManager(tmp_path, incarnation="mine", run_id="job", storage=storage)
    manager.restore()
    assert read_record(storage, str(tmp_path)) is None
    storage.is_closed = False
    assert saved(manager, 1).state == "committed"
    record = read_record(storage, str(tmp_path))
    assert record is not None
    assert (record.rounds, record.owner) == (((1, 0),), (1, "job/mine"))
    manager.close()


def test_a_job_that_began_while_the_directory_was_read_only_leaves_it_to_whoever_came_meanwhile(tmp_path: Path) -> None:
    storage = Refusing()
    early = CheckpointManager(tmp_path, round=1, incarnation="early", storage=storage)
    early.restore()
    late = CheckpointManager(tmp_path, round=1, incarnation="late")
    late.restore()
    assert saved(late, 5).state == "committed"
    storage.is_closed = False
    lost = saved(early, 5)
    assert lost.state == "failed"
    assert "by another job as well" in (lost.error or "")
    restored = late.restore()
    assert restored is not None
    assert_same(restored.state, small_state(5))
    for manager in (early, late):
        manager.close()
    assert committed(tmp_path) == ["step-000000000005"]


def lose_directory(rank: int, world: int, store: Any, base: Path) -> list[tuple[str, str]]:
    """Saves before, while and after the directory is away, as with a mount that goes and comes back."""
    directory, away = base / "kept", base / "away"
    manager = CheckpointManager(directory, rank=rank, world_size=world, store=store)
    manager.restore()
    told = []
    for step in (1, 2, 3, 4):
        store.set(f"ready/{step}/{rank}", "1")
        store.wait([f"ready/{step}/{r}" for r in range(world)])
        if step == 3 and rank == 0:
            directory.rename(away)
        elif step == 4 and rank == 0:
            assert not list(directory.glob("*")) if directory.exists() else True
            if directory.exists():
                directory.rmdir()
            away.rename(directory)
        store.set(f"moved/{step}/{rank}", "1")
        store.wait([f"moved/{step}/{r}" for r in range(world)])
        result = saved(manager, step)
        told.append((result.state, result.error or ""))
    manager.close()
    return told


def test_a_directory_that_is_unmounted_is_not_made_anew_and_serves_again_when_it_is_back(tmp_path: Path) -> None:
    for told in run_ranks(2, lose_directory, tmp_path):
        assert [state for state, _ in told] == ["committed", "committed", "failed", "committed"]
        assert "rounds.json was there and is gone: the directory was unmounted" in told[2][1]
    assert committed(tmp_path / "kept") == [f"step-00000000000{step}" for step in (1, 2, 4)]


def manager_with_memory(base: Path, round_: int, folder: str = "shm") -> CheckpointManager:
    return CheckpointManager(base / "kept", round=round_, incarnation="mine", memory=MemoryTier(base / folder))


def test_a_directory_that_went_between_two_rounds_is_not_begun_anew_and_memory_goes_on(tmp_path: Path) -> None:
    """Its mount point is an empty directory."""
    first = manager_with_memory(tmp_path, 1)
    first.restore()
    assert saved(first, 4).state == "committed"
    first.keep(6, small_state(6))
    first.close()
    (tmp_path / "kept").rename(tmp_path / "away")
    (tmp_path / "kept").mkdir()
    second = manager_with_memory(tmp_path, 2)
    restored = second.restore()
    assert restored is not None
    assert restored.step == 6
    lost = saved(second, 8)
    assert lost.state == "failed"
    assert "the directory was unmounted" in (lost.error or "")
    assert not list((tmp_path / "kept").iterdir())
    (tmp_path / "kept").rmdir()
    (tmp_path / "away").rename(tmp_path / "kept")
    assert saved(second, 9).state == "committed"
    second.close()
    for path in (tmp_path / "shm").glob("rank-*"):
        path.unlink()
    (tmp_path / "kept").rename(tmp_path / "away")
    third = manager_with_memory(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint directory: .*was there and is gone"):
        third.restore()
    third.close()


def test_rounds_go_on_counting_by_what_memory_knows_while_the_directory_is_away(tmp_path: Path) -> None:
    """For a loop that does not say which round it is."""

    def manager() -> CheckpointManager:
        return CheckpointManager(tmp_path / "kept", memory=MemoryTier(tmp_path / "shm"))

    for round_ in (1, 2):
        first = manager()
        first.restore()
        assert first.round == round_
        assert saved(first, 4 * round_).state == "committed"
        first.close()
    (tmp_path / "kept").rename(tmp_path / "away")
    for round_, begins, ends in ((3, 8, 11), (4, 11, 15)):
        later = manager()
        restored = later.restore()
        assert restored is not None
        assert (later.round, restored.step) == (round_, begins)
        for step in range(begins + 1, ends + 1):
            assert later.keep(step, small_state(step)) is not None
        if round_ == 4:
            (tmp_path / "away").rename(tmp_path / "kept")
            assert saved(later, ends + 1).state == "committed"
        later.close()


def begin_without_directory(rank: int, world: int, store: Any, base: Path) -> list[tuple[str, str]]:
    """A first round that saves; a second one that begins while the mount point is empty, and gets its mount back."""
    told, directory, away = [], base / "kept", base / "away"
    for round_, step in ((1, 1), (2, 2)):
        tier = MemoryTier(base / "shm", local_rank=rank, local_world_size=world)
        manager = CheckpointManager(
            directory, rank=rank, world_size=world, store=store, round=round_, incarnation="mine", memory=tier
        )
        manager.restore()
        for save in (step, step + 10, step + 20):
            result = saved(manager, save)
            told.append((result.state, result.error or ""))
            store.set(f"saved/{round_}/{save}/{rank}", "1")
            store.wait([f"saved/{round_}/{save}/{r}" for r in range(world)])
            if rank == 0 and round_ == 2 and save == step:
                assert not list(directory.iterdir())
                directory.rmdir()
                away.rename(directory)
            store.set(f"moved/{round_}/{save}/{rank}", "1")
            store.wait([f"moved/{round_}/{save}/{r}" for r in range(world)])
        manager.close()
        if rank == 0 and round_ == 1:
            directory.rename(away)
            directory.mkdir()
        store.set(f"ended/{round_}/{rank}", "1")
        store.wait([f"ended/{round_}/{r}" for r in range(world)])
    return told


def test_a_round_that_begins_without_its_directory_finds_out_who_shares_it_when_it_is_back(tmp_path: Path) -> None:
    for told in run_ranks(2, begin_without_directory, tmp_path):
        states = [state for state, _ in told]
        assert states[:4] == ["committed"] * 3 + ["failed"], told
        assert "was there and is gone" in told[3][1]
        assert states[-1] == "committed", told


def test_a_program_that_goes_to_another_directory_is_not_told_that_it_is_gone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        manager = CheckpointManager(tmp_path / name, memory=MemoryTier(tmp_path / "shm"))
        manager.restore()
        assert saved(manager, 50 if name == "two" else 5).state == "committed"
        manager.close()


def test_memory_of_a_node_that_was_away_is_not_taken_while_nobody_can_see_what_was_committed_since(
    tmp_path: Path,
) -> None:
    """The node was frozen in round 1; round 2 went on without it, and its checkpoints cannot be read now."""
    for round_, folder, step in ((1, "frozen", 4), (2, "other", 9)):
        manager = manager_with_memory(tmp_path, round_, folder)
        manager.restore()
        assert saved(manager, step).state == "committed"
        manager.close()
    (tmp_path / "kept").rename(tmp_path / "away")
    (tmp_path / "kept").write_text("a file server that is gone")
    third = manager_with_memory(tmp_path, 3, "frozen")
    with pytest.raises(CheckpointError, match="memory is of round 1, and round 2 may have committed more"):
        third.restore()
    third.close()
    (tmp_path / "kept").unlink()
    (tmp_path / "away").rename(tmp_path / "kept")
    fourth = manager_with_memory(tmp_path, 4, "frozen")
    restored = fourth.restore()
    assert restored is not None
    assert restored.step == 9
    fourth.close()


def test_a_damaged_record_is_mended_by_the_next_commit(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, incarnation="mine")
    manager.restore()
    (tmp_path / "rounds.json").write_bytes(b"{")
    assert saved(manager, 1).state == "committed"
    record = read_record(LocalStorage(), str(tmp_path))
    assert record is not None
    assert record.owner == (1, "/mine")
    manager.close()


def test_rounds_that_could_not_be_recorded_are_no_sign_of_another_directory(tmp_path: Path) -> None:
    """A file system that is read-only for a round: the next one is recorded, and commits."""
    storage, folder = Refusing(), tmp_path / "memory"
    for number, closed in ((1, False), (2, True), (3, True), (4, False)):
        storage.is_closed = closed
        tier = MemoryTier(folder)
        manager = CheckpointManager(
            tmp_path / "disk", run_id="job", incarnation="i", round=number, storage=storage, memory=tier
        )
        manager.restore()
        assert manager.keep(number, small_state(number)) is not None
        if not closed:
            assert saved(manager, 10 * number).state == "committed"
        manager.close()
