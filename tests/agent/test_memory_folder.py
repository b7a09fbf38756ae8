"""The agent's folder in shared memory: closed to others, gone with the agent, freed by the next one after kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic.agent.memory import PLACE_VARIABLE, memory_folder


def test_folder_is_closed_to_others_and_gone_afterwards(tmp_path: Path) -> None:
    with memory_folder(lambda folder: None, {PLACE_VARIABLE: str(tmp_path)}) as folder:
        assert folder is not None
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        (Path(folder) / "rank-0-slot-0").write_bytes(b"x")
        with memory_folder(lambda folder: None, {PLACE_VARIABLE: str(tmp_path)}) as other:  # a live one is not touched
            assert other != folder
            assert (Path(folder) / "rank-0-slot-0").exists()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_agent_held_is_freed_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    stranger = tmp_path / "psm_other"
    stranger.mkdir()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with memory_folder(lambda folder: None, {PLACE_VARIABLE: str(tmp_path)}) as folder:
            (Path(folder or "") / "rank-0-slot-0").write_bytes(b"x")
            os.write(writer, b"x")
            signal.pause()
    assert os.read(reader, 1)
    (left,) = tmp_path.glob("elasticd-*")
    with memory_folder(lambda folder: None, {PLACE_VARIABLE: str(tmp_path)}):
        assert left.exists()  # its agent lives
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with memory_folder(lambda folder: None, {PLACE_VARIABLE: str(tmp_path)}) as folder:
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == sorted([Path(folder or ""), stranger])


def test_no_shared_memory_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory_folder(lambda folder: None, {PLACE_VARIABLE: str(tmp_path / "missing")}) as folder:
        assert folder is None
    assert "checkpoints in memory are off" in caplog.text
