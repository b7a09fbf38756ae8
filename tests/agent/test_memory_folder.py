"""The agent's folder in shared memory: closed to others, gone with the agent, freed by the next one after kill -9."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from pathlib import Path

import pytest

from elastic.agent import rescuing
from elastic.agent.memory import PLACE_VARIABLE, free_memory, keep_memory, memory_folder, sweep
from elastic.agent.rescuing import Finder, begin_rescue, note_owner
from elastic.own_checkpoints import own_checkpoints
from tests.unit.settings import loaded


def test_folder_is_closed_to_others_and_gone_afterwards(tmp_path: Path) -> None:
    with memory_folder({PLACE_VARIABLE: str(tmp_path)}) as held:
        assert held is not None
        assert held.folder.stat().st_mode & 0o777 == 0o700
        (held.folder / "rank-0-slot-0").write_bytes(b"x")
        with memory_folder({PLACE_VARIABLE: str(tmp_path)}) as other:  # a live one is not touched
            assert other is not None
            assert other.folder != held.folder
            assert (held.folder / "rank-0-slot-0").exists()
    assert not list(tmp_path.iterdir())


def killed_in(place: Path) -> Path:
    """The folder of an agent that was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with memory_folder({PLACE_VARIABLE: str(place)}) as held:
            assert held is not None
            (held.folder / "rank-0-slot-0").write_bytes(b"x")
            os.write(writer, b"x")
            signal.pause()
    assert os.read(reader, 1)
    (left,) = place.glob("elasticd-*")
    sweep(Finder(), {PLACE_VARIABLE: str(place)})
    assert left.exists()  # its agent lives
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return left


def test_what_a_killed_agent_held_is_freed_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    stranger = tmp_path / "psm_other"
    stranger.mkdir()
    left = killed_in(tmp_path)
    with memory_folder({PLACE_VARIABLE: str(tmp_path)}) as held:
        sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
        assert not left.exists()
        assert held is not None
        assert sorted(tmp_path.iterdir()) == sorted([held.folder, stranger])


def test_what_cannot_be_saved_now_is_kept_until_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file where the directory was: what is there is not known."""
    left, disk = killed_in(tmp_path), tmp_path / "disk"
    disk.write_text("a file server that is away")
    (left / "owner.json").write_text(json.dumps({"run_id": "job", "directory": str(disk), "seconds": 30.0}))
    sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
    assert (left / "rank-0-slot-0").exists()
    assert f"stays in {left}" in caplog.text
    disk.unlink()
    sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})  # there is a directory to look at, and nothing whole to save
    assert not left.exists()


def test_a_start_does_not_wait_for_the_disk_of_another_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left, pauses = killed_in(tmp_path), 0

    def pause(_seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        time.sleep(0.05)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk, link = tmp_path / "disk", tmp_path / "link"
    link.symlink_to(disk)
    (left / "owner.json").write_text(json.dumps({"run_id": "job", "directory": str(disk), "seconds": 3.0}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own_checkpoints("rescue"), "rescue", full)
        other = loaded("--rdzv-id", "other", "--checkpoint-dir", str(tmp_path / "elsewhere"), __file__)
        began = time.monotonic()
        for config in (other, None):
            sweep(Finder(config, pause=pause), {PLACE_VARIABLE: str(tmp_path)})
        assert time.monotonic() - began < 2, "looked at once each"
        assert "this start" not in caplog.text
        ours = loaded("--rdzv-id", "job", "--drain-grace", "3", "--checkpoint-dir", str(link), __file__)
        began = time.monotonic()
        sweep(Finder(ours, pause=pause), {PLACE_VARIABLE: str(tmp_path)})
        assert time.monotonic() - began >= 2, "tried again and again"
        assert "this start goes on from what is on disk" in caplog.text
    assert pauses
    assert left.exists()


def test_all_neighbours_together_cost_a_start_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescuing, "_FOREIGN_SECONDS", 1.0)
    monkeypatch.setattr(own_checkpoints("rescue"), "rescue", lambda *_, **__: time.sleep(3.0))
    for number in range(3):
        left = killed_in(tmp_path)
        owner = {"run_id": "job", "directory": str(tmp_path / f"disk{number}"), "seconds": 30.0}
        (left / "owner.json").write_text(json.dumps(owner))
        left.rename(tmp_path / f"kept-{number}")
    for number in range(3):
        (tmp_path / f"kept-{number}").rename(tmp_path / f"elasticd-{os.geteuid()}-{number}")
    config = loaded("--rdzv-id", "other", "--checkpoint-dir", str(tmp_path / "elsewhere"), __file__)
    began = time.monotonic()
    assert sweep(Finder(config), {PLACE_VARIABLE: str(tmp_path)}) is None
    assert time.monotonic() - began < 2.5
    assert len(list(tmp_path.glob("elasticd-*/unsaved"))) == 3


def test_a_disk_that_is_too_slow_for_the_grace_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_checkpoints("rescue"), "rescue", lambda *_, **__: time.sleep(5.0))
    monkeypatch.setattr(Finder, "_can_go_on_with", lambda *_: True)
    left, disk = killed_in(tmp_path), str(tmp_path / "disk")
    (left / "owner.json").write_text(json.dumps({"run_id": "job", "directory": disk, "seconds": 0.1}))
    ours = loaded("--rdzv-id", "job", "--drain-grace", "1", "--checkpoint-dir", disk, __file__)
    began = time.monotonic()
    inheritance = sweep(Finder(ours), {PLACE_VARIABLE: str(tmp_path)})
    assert 1.0 <= time.monotonic() - began < 4.0, "the patience is this start's, not that of the dead one"
    assert inheritance is not None
    with memory_folder({PLACE_VARIABLE: str(tmp_path)}, inheritance) as held:
        assert held is not None
        assert (held.folder / "rank-0-slot-0").exists()
        assert not left.exists()
        free_memory(held.folder)
    assert not list(tmp_path.glob("elasticd-*"))
    assert "this start goes on from it in memory" in caplog.text


@pytest.mark.parametrize(("error", "goes_on"), [("CheckpointError", True), ("ForeignDirectoryError", False)])
def test_a_directory_that_is_gone_costs_no_step_and_another_jobs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, goes_on: bool
) -> None:
    """It was a link's; that leads elsewhere by now."""
    asked: list[str] = []

    def rescue(_folder: object, directory: str, *_: object, **__: object) -> None:
        asked.append(directory)
        raise getattr(own_checkpoints("errors"), error)("not there")

    monkeypatch.setattr(own_checkpoints("rescue"), "rescue", rescue)
    monkeypatch.setattr(Finder, "_can_go_on_with", lambda *_: True)
    left, disk, link = killed_in(tmp_path), tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    (tmp_path / "other").mkdir()
    link.symlink_to(tmp_path / "other")
    notes = {"run_id": "job", "directory": str(link), "place": str(disk), "seconds": 5.0}
    (left / "owner.json").write_text(json.dumps(notes))
    inheritance = sweep(
        Finder(loaded("--rdzv-id", "job", "--checkpoint-dir", str(disk), __file__)), {PLACE_VARIABLE: str(tmp_path)}
    )
    assert asked == [str(disk)]
    assert (inheritance is not None) == goes_on
    if inheritance is not None:
        os.close(inheritance.descriptor)
    assert (left / "rank-0-slot-0").exists()


def test_steps_of_nobody_knows_whom_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = killed_in(tmp_path)
    for text in ("", "[" * 200_000):
        (left / "owner.json").write_text(text)
        sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
        assert (left / "rank-0-slot-0").exists()
        assert f"{left} holds steps, and owner.json does not say whose" in caplog.text
        caplog.clear()


def test_notes_that_find_no_room_leave_those_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner.json").write_text("of before")

    def full(path: Path, _text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    note_owner(tmp_path, loaded("--checkpoint-dir", str(tmp_path / "disk"), __file__))
    begin_rescue(tmp_path)
    assert (tmp_path / "owner.json").read_text() == "of before"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_what_another_user_has_put_there_is_not_looked_into(tmp_path: Path) -> None:
    trap = tmp_path / f"elasticd-{os.geteuid()}-1-x"
    trap.mkdir(mode=0o755)
    os.mkfifo(trap / "owner.json")
    os.chown(trap, 65534, 65534)
    descriptor = os.open(trap, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sweep(Finder(loaded("--checkpoint-dir", str(tmp_path / "disk"), __file__)), {PLACE_VARIABLE: str(tmp_path)})
    os.close(descriptor)
    assert trap.exists()


def test_memory_of_many_nodes_is_saved_by_who_finds_it_only_once_its_agent_was_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the others have it all."""
    asked: list[object] = []
    monkeypatch.setattr(own_checkpoints("rescue"), "rescue", lambda folder, *_, **__: asked.append(folder))
    many = loaded(
        *("--rdzv-backend", "etcd3", "--rdzv-endpoint", "h:1", "--rdzv-id", "job", "--nnodes", "1:2"),
        *("--checkpoint-dir", str(tmp_path / "disk"), __file__),
    )
    left = killed_in(tmp_path)
    note_owner(left, many)
    sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
    assert not left.exists()
    assert asked == []
    left = killed_in(tmp_path)
    note_owner(left, many)
    begin_rescue(left)
    sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
    assert asked == [left]


def test_no_room_to_note_whose_memory_it_is_keeps_no_agent_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".owner.json").symlink_to("/dev/full")
    note_owner(tmp_path, loaded("--checkpoint-dir", str(tmp_path / "disk"), __file__))
    assert "No space left on device: steps that memory alone holds would go with this agent" in caplog.text
    begin_rescue(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), MemoryError()])
def test_an_error_that_nobody_thought_of_frees_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    left = killed_in(tmp_path)
    (left / "owner.json").write_text(json.dumps({"run_id": "job", "directory": str(tmp_path / "disk"), "seconds": 30}))
    with monkeypatch.context() as patched:
        patched.setattr(own_checkpoints("rescue"), "rescue", fail)
        sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
    assert (left / "rank-0-slot-0").exists()
    assert "what memory alone holds could not be saved" in caplog.text
    assert repr(error) in caplog.text or str(error) in caplog.text
    sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
    assert not left.exists()


def test_what_its_own_agent_could_not_save_outlives_it(tmp_path: Path) -> None:
    with memory_folder({PLACE_VARIABLE: str(tmp_path)}) as held:
        assert held is not None
        keep_memory(held.folder)
    assert held.folder.exists()
    sweep(Finder(), {PLACE_VARIABLE: str(tmp_path)})
    assert not held.folder.exists()


def test_a_start_waits_for_who_saves_what_its_job_goes_on_from_and_for_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left, waits = killed_in(tmp_path), 0
    (left / "owner.json").write_text(json.dumps({"run_id": "job", "directory": str(tmp_path / "disk"), "seconds": 30}))
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another process that has found it

    def let_go(_seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def finder(run_id: str, disk: str) -> Finder:
        return Finder(loaded("--rdzv-id", run_id, "--checkpoint-dir", str(tmp_path / disk), __file__), pause=let_go)

    sweep(finder("again", "disk"), {PLACE_VARIABLE: str(tmp_path)})
    assert (waits, left.exists()) == (0, True), "it is not saved there: a live agent"
    (left / "rescuing").touch()
    sweep(finder("job", "other"), {PLACE_VARIABLE: str(tmp_path)})
    assert (waits, left.exists()) == (0, True)
    owner = (left / "owner.json").read_text()
    (left / "owner.json").write_text(owner.replace("30", "0"))
    sweep(finder("again", "disk"), {PLACE_VARIABLE: str(tmp_path)})
    assert (waits, left.exists()) == (0, True)
    assert "going on without it" in caplog.text
    (left / "owner.json").write_text(owner)
    sweep(finder("again", "disk"), {PLACE_VARIABLE: str(tmp_path)})
    assert not left.exists()
    assert waits >= 3
    os.close(descriptor)


def test_no_shared_memory_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory_folder({PLACE_VARIABLE: str(tmp_path / "missing")}) as held:
        assert held is None
    assert "checkpoints in memory are off" in caplog.text
