"""The storage contract, on a local file system and on an object store; whole runs on an object store."""

from __future__ import annotations

import errno
import importlib.util
import mmap
import os
import uuid
from pathlib import Path

import pytest
import torch

from checkpoints import catalog
from checkpoints.errors import NoDriverError
from checkpoints.manager import CheckpointManager
from checkpoints.manifest import Hasher, checksum
from checkpoints.storage import LocalStorage, Storage, open_storage
from tests.checkpoints.support import assert_same, cut_state


@pytest.fixture(params=["local", "object"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Storage, str]:
    if request.param == "local":
        return open_storage(tmp_path / "base")
    return open_storage(f"memory://{uuid.uuid4()}")


@pytest.mark.parametrize(
    ("url", "words"), [("nosuch://bucket/x", "Protocol not known: nosuch"), ("s3://bucket/x", "s3fs")]
)
def test_a_url_that_nothing_here_can_reach_is_refused_by_name(url: str, words: str) -> None:
    if url.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(NoDriverError, match=f"{url}: .*{words}"):
        open_storage(url)


def aligned(size: int) -> memoryview:
    buffer = mmap.mmap(-1, size)
    buffer.write(os.urandom(size))
    return memoryview(buffer)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 1 << 20, (1 << 20) + 1, (33 << 20) + 5])
def test_what_is_written_is_read_and_was_observed_in_order(place: tuple[Storage, str], size: int) -> None:
    storage, base = place
    data = aligned(max(size, 1))[:size]
    hasher = Hasher()
    storage.make_directory(base)
    storage.write(storage.join(base, "file"), data, hasher.update)
    assert storage.read(storage.join(base, "file")) == data
    assert storage.size(storage.join(base, "file")) == size
    assert hasher.result() == checksum(bytes(data))


def test_unaligned_and_read_only_memory_can_be_written(place: tuple[Storage, str]) -> None:
    storage, base = place
    data = aligned(3 << 20)[77:]
    storage.make_directory(base)
    for name, content in (("view", data), ("bytes", bytes(data))):
        storage.write(storage.join(base, name), content)
        assert storage.read(storage.join(base, name)) == data


def test_names_sizes_and_removal(place: tuple[Storage, str]) -> None:
    storage, base = place
    assert storage.names(base) == []
    assert storage.size(storage.join(base, "no")) is None
    storage.remove(storage.join(base, "no"))
    storage.remove_tree(storage.join(base, "no"))
    directory = storage.join(base, "directory")
    storage.make_directory(directory)
    storage.make_directory(directory)
    storage.write(storage.join(directory, "b"), b"1")
    storage.replace(storage.join(directory, "a"), b"2")
    storage.replace(storage.join(directory, "a"), b"33")
    assert storage.names(directory) == ["a", "b"]
    assert storage.names(base) == ["directory"]
    assert storage.read(storage.join(directory, "a")) == b"33"
    assert storage.size(directory) is None or isinstance(storage, LocalStorage)
    storage.remove(storage.join(directory, "a"))
    assert storage.names(directory) == ["b"]
    storage.remove_tree(directory)
    assert storage.names(directory) == []


def test_file_systems_without_o_direct_are_written_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.pwrite, []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and offset >= 16 << 20:
            refused.append(offset)
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = aligned(40 << 20)
    hasher = Hasher()
    LocalStorage().write(str(tmp_path / "file"), data, hasher.update)
    assert (tmp_path / "file").read_bytes() == data
    assert hasher.result() == checksum(data)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda d, data, offset: real(d, data[: max(len(data) // 2, 1)], offset))
    data = aligned((5 << 20) + 123)
    hasher = Hasher()
    LocalStorage().write(str(tmp_path / "file"), data, hasher.update)
    assert (tmp_path / "file").read_bytes() == data
    assert hasher.result() == checksum(data)


def test_failed_replace_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage()
    storage.replace(str(tmp_path / "file"), b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="full"):
        storage.replace(str(tmp_path / "file"), b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_new_directory_is_made_by_one_where_one_can_tell(place: tuple[Storage, str]) -> None:
    storage, base = place
    storage.make_directory(base)
    path = storage.join(base, "new")
    assert storage.make_new_directory(path)
    assert storage.make_new_directory(path) is not storage.renames
    storage.write(storage.join(path, "file"), b"x")
    assert storage.names(path) == ["file"]


def test_swap_exchanges_two_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / name).mkdir(parents=True)
    if not LocalStorage().swap(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()
    with pytest.raises(FileNotFoundError):
        LocalStorage().swap(str(tmp_path / "a"), str(tmp_path / "c"))


def test_file_url_is_a_local_directory(tmp_path: Path) -> None:
    storage, path = open_storage(f"file://{tmp_path}/x")
    assert isinstance(storage, LocalStorage)
    assert path == f"{tmp_path}/x"


def test_run_on_an_object_store() -> None:
    url = f"memory://{uuid.uuid4()}/run"
    for round_ in (1, 2):
        manager = CheckpointManager(url, keep_last=2)
        restored = manager.restore(cut_state(0))
        assert (restored.step if restored is not None else 0) == (round_ - 1) * 5
        for step in range(round_ * 5 - 4, round_ * 5 + 1):
            manager.save(step, cut_state(step))
        manager.close()
    assert [(e["step"], e["round"], e["state"]) for e in catalog.verify(url)] == [
        (9, 2, "committed"),
        (10, 2, "committed"),
    ]


def test_object_store_keeps_the_old_state_until_the_new_manifest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4()}/run"
    storage, base = open_storage(url)
    manager = CheckpointManager(url)
    manager.restore()
    manager.save(1, cut_state(1))
    manager.close()

    manager = CheckpointManager(url)
    manager.restore()

    def broken(path: str, data: bytes) -> None:
        raise OSError(errno.EIO, "cut off")

    monkeypatch.setattr(manager._storage, "replace", broken)
    manager.save(1, cut_state(2))
    result = manager.wait()
    assert result is not None
    assert result.state == "failed"
    monkeypatch.undo()
    manager.close()

    manager = CheckpointManager(url)
    restored = manager.restore()
    assert restored is not None
    assert_same(restored.state, cut_state(1))
    manager.save(1, {"w": torch.ones(3)})
    manager.close()
    manager = CheckpointManager(url)
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert restored.state["w"].shape == (3,)
    assert len([name for name in storage.names(f"{base}/step-000000000001") if name.startswith("shard-")]) == 1
