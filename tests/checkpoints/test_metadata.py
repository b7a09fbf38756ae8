"""Metadata that is damaged, foreign or hostile: it is passed over with a reason, whatever is in it."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import catalog, strict
from checkpoints import manifest as manifests
from checkpoints.errors import CheckpointError, CorruptCheckpointError
from checkpoints.manager import CheckpointManager
from checkpoints.manifest import canonical, checksum
from checkpoints.rounds import read_rounds, record_rounds
from checkpoints.storage import LocalStorage
from tests.checkpoints.support import assert_same, cut_state, newest, small_state

DEEP = 100_000


def save_steps(directory: Path, *steps: int) -> None:
    manager = CheckpointManager(directory, keep_last=10)
    manager.restore()
    for step in steps:
        manager.save(step, small_state(step))
    manager.close()


def signed(body: dict[str, Any]) -> bytes:
    body = {key: value for key, value in body.items() if key != "checksum"}
    return canonical({**body, "checksum": checksum(canonical(body))})


def edit(body: Any, path: str, value: Any) -> None:
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in way:
        body = body[key]
    body[last] = value


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The body of a sound manifest; its tensor 0 has pieces, tensor 1 is the same as 0, tensor 3 is empty."""
    directory = tmp_path_factory.mktemp("sound")
    save_steps(directory, 1)
    body: dict[str, Any] = json.loads((newest(directory) / "manifest.json").read_bytes())
    assert [len(t.get("pieces", ())) for t in body["tensors"][:4]] == [1, 0, 1, 0]
    assert "same_as" in body["tensors"][1]
    return body


INTEGERS = ["round", "base_step", "step", "world_size", "samples", "files/0/bytes", "tensors/0/shape/0"]
INTEGERS += [f"tensors/0/pieces/0/{place}" for place in range(3)]
TEXTS = ["run_id", "incarnation", "fingerprint", "commit", "files/0/name", "files/0/checksum", "tensors/0/name"]
TEXTS += ["tensors/0/dtype", "tensors/1/same_as"]
LISTS = ["files", "tensors", "tensors/0/shape", "tensors/0/pieces", "tensors/0/pieces/0"]
WRONG: list[tuple[str, Any]] = [
    *((path, value) for path in INTEGERS for value in ("1", 1.0, 1.5, -1, 2**70, True, None, [1], {})),
    *((path, value) for path in TEXTS for value in (1, 1.5, True, ["x"], {"x": 1})),
    *((path, None) for path in TEXTS if path != "tensors/1/same_as"),
    *((path, value) for path in LISTS for value in (1, "x", None, {"x": 1}, [1.5], [None], [[[]]])),
    *(("files/0/name", value) for value in ("", ".", "..", "a/b", "/etc/passwd", "a\0b", "\ud800", "manifest.json")),
    *(("unix_time", value) for value in ("1", None, True, 10**400, [])),
    ("files/0", "x"),
    ("tensors/0", 5),
    ("tensors/0/dtype", "float33"),
    ("tensors/0/shape", [2**40, 2**40]),
    ("tensors/0/shape", [1 << 20, 1 << 20]),
    ("tensors/3/shape", [0, 2**62, 2**62]),
    ("tensors/1/shape", [8, 16]),  # it shares the memory of another shape
    ("tensors/1/same_as", "nothing"),
    ("tensors/1/pieces", [[0, 0, 1]]),
    ("tensors/2/name", "model/weight"),  # another's
    ("files/0/bytes", 1),  # less than the pieces in it
    ("state", nested(300)),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: repr(value)[:30])
def test_manifest_with_a_wrong_value_and_a_right_checksum_is_corrupt(
    sound: dict[str, Any], path: str, value: Any
) -> None:
    body = copy.deepcopy(sound)
    manifests.parse(signed(body))
    edit(body, path, value)
    with pytest.raises(CorruptCheckpointError):
        manifests.parse(signed(body))


@pytest.mark.parametrize("name", [*manifests.Manifest.__dataclass_fields__])
def test_manifest_that_lacks_a_field_is_corrupt(sound: dict[str, Any], name: str) -> None:
    if name != "pieces":
        with pytest.raises(CorruptCheckpointError, match=name):
            manifests.parse(signed({key: value for key, value in sound.items() if key != name}))


def test_manifest_of_two_files_with_one_name_is_corrupt(sound: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="same name"):
        manifests.parse(signed({**sound, "files": sound["files"] * 2}))


NO_JSON = {
    "NaN": b'{"format":1,"a":NaN}',
    "infinity": b'{"format":1,"a":-Infinity}',
    "overflow": b'{"format":1,"a":1e400}',
    "long integer": b'{"format":1,"a":' + b"1" * 5000 + b"}",
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "unclosed": b"[" * DEEP,
    "not UTF-8": b'{"format":1,"a":"\xff"}',
    "empty": b"",
    "null": b"null",
    "format is a list": b'{"format":[1]}',
}


@pytest.mark.parametrize("kind", NO_JSON)
def test_text_that_is_no_manifest_is_corrupt(kind: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        manifests.parse(NO_JSON[kind])


@pytest.mark.parametrize("kind", NO_JSON)
def test_text_that_is_no_record_of_rounds_is_ignored_with_a_warning(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rounds.json").write_bytes(NO_JSON[kind])
    assert read_rounds(LocalStorage(), str(tmp_path)) == ()
    assert "rounds.json is unreadable and ignored" in caplog.text


ROUNDS = [
    [[1e300, 0]],
    [["1", 0]],
    [[1, 0.0]],
    [[-1, 0]],
    [[2**70, 0]],
    [[1]],
    [[1, 2, 3]],
    [1],
    {"1": 0},
    None,
    [None],
]


@pytest.mark.parametrize("rounds", ROUNDS, ids=repr)
def test_rounds_of_wrong_types_are_ignored_although_the_checksum_is_right(
    tmp_path: Path, rounds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rounds.json").write_bytes(signed({"rounds": rounds}))
    assert read_rounds(LocalStorage(), str(tmp_path)) == ()
    assert "ignored" in caplog.text


def test_altered_rounds_void_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 10, 20)
    path = tmp_path / "rounds.json"
    assert read_rounds(LocalStorage(), str(tmp_path)) == ((1, 0),)
    altered = json.loads(path.read_bytes())
    for data in (canonical({**altered, "rounds": [[2, 5]]}), b"[[2,5]]", b"[[1e400,0]]"):
        path.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            entries = catalog.list_checkpoints(tmp_path)
        assert [entry["state"] for entry in entries] == ["committed", "committed"]
        assert "rounds.json is unreadable and ignored" in caplog.text
    manager = CheckpointManager(tmp_path)
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert restored.step == 20
    assert read_rounds(LocalStorage(), str(tmp_path)) == ((manager.round, 20),)


def test_any_flipped_bit_of_the_rounds_is_noticed(tmp_path: Path) -> None:
    storage = LocalStorage()
    for round_, base_step in ((3, 10), (7, 40)):
        record_rounds(storage, str(tmp_path), [(round_, base_step)])
    data = (tmp_path / "rounds.json").read_bytes()
    assert read_rounds(storage, str(tmp_path)) == ((3, 10), (7, 40))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        (tmp_path / "rounds.json").write_bytes(damaged)
        assert read_rounds(storage, str(tmp_path)) == ()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def loop_step(directory: Path) -> None:
    shutil.rmtree(newest(directory))
    loop(directory / "step-000000000003")


def loop_manifest(directory: Path) -> None:
    path = newest(directory) / "manifest.json"
    path.unlink()
    loop(path)


def loop_shard(directory: Path) -> None:
    path = next(newest(directory).glob("shard-*"))
    path.unlink()
    loop(path)


def pipe_manifest(directory: Path) -> None:
    path = newest(directory) / "manifest.json"
    path.unlink()
    os.mkfifo(path)


def pipe_rounds(directory: Path) -> None:
    (directory / "rounds.json").unlink()
    os.mkfifo(directory / "rounds.json")
    loop_manifest(directory)


def loop_rounds(directory: Path) -> None:
    (directory / "rounds.json").unlink()
    loop(directory / "rounds.json")
    loop_manifest(directory)


def deep_manifest(directory: Path) -> None:
    (newest(directory) / "manifest.json").write_bytes(NO_JSON["deep lists"])


def huge_shape(directory: Path) -> None:
    path = newest(directory) / "manifest.json"
    body = json.loads(path.read_bytes())
    body["tensors"][0] |= {"shape": [1 << 44], "pieces": [[0, 0, 1 << 44]]}
    path.write_bytes(signed(body))


def odd_state(directory: Path) -> None:
    path = newest(directory) / "manifest.json"
    body = json.loads(path.read_bytes())
    body["state"] = {"~float": 10**400}
    path.write_bytes(signed(body))


def deep_header(directory: Path) -> None:
    path = next(newest(directory).glob("shard-*"))
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 : 8 + length] = b"[" * length
    path.write_bytes(data)


DAMAGES = [loop_step, loop_manifest, loop_shard, pipe_manifest, loop_rounds, pipe_rounds, deep_manifest]
DAMAGES += [huge_shape, odd_state, deep_header]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_step_that_cannot_be_read_is_unsound_and_the_others_serve(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path)
    listed = {entry["step"]: entry["state"] for entry in catalog.list_checkpoints(tmp_path)}
    assert (listed[1], listed[2]) == ("committed", "committed")
    assert listed[3] in ("corrupt", "partial") or damage in (odd_state, deep_header)
    manager = CheckpointManager(tmp_path, keep_last=1)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == 2
    assert_same(restored.state, small_state(2))
    assert [path for path, _ in restored.skipped] == [str(tmp_path / "step-000000000003")]
    manager.save(3, small_state(33))
    result = manager.wait()
    assert result is not None
    assert result.state == "committed", result.error
    again = manager.restore()
    manager.close()
    assert again is not None
    assert_same(again.state, small_state(33))


def test_what_could_not_be_read_back_is_not_committed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, cut_state(1), samples=1.5)  # type: ignore[arg-type]
    result = manager.wait()
    manager.close()
    assert result is not None
    assert result.state == "failed"
    assert "samples is 1.5" in str(result.error)
    assert not list(tmp_path.glob("*step-*"))


def test_strict_json_takes_what_a_state_of_the_deepest_kind_needs() -> None:
    assert strict.loads(canonical({"a": nested(200)})) == {"a": nested(200)}


COPIES = ["step-000000000500", "step-0000000000003", ".void-step-000000000500-r1-x"]


@pytest.mark.parametrize("name", COPIES)
def test_copy_under_another_name_is_corrupt_for_all_and_no_sound_newest_one(tmp_path: Path, name: str) -> None:
    save_steps(tmp_path, 1, 2, 3)
    shutil.copytree(newest(tmp_path), tmp_path / name)
    for look in (catalog.list_checkpoints, catalog.verify):
        (entry,) = (entry for entry in look(tmp_path) if entry["path"] == str(tmp_path / name))
        assert entry["state"] == "corrupt"
        assert "manifest is that of step 3" in entry["reason"]
    assert [entry["step"] for entry in catalog.prune(tmp_path, 2)] == [1]
    assert (tmp_path / name).exists()
    catalog.prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == sorted([name, "step-000000000003"])
    if name == "step-000000000500":
        with pytest.raises(CheckpointError, match=r"step-0+500: .*step 3"):
            catalog.show(tmp_path, 500)
    manager = CheckpointManager(tmp_path)
    restored = manager.restore()
    manager.close()
    assert restored is not None
    assert restored.step == 3
    assert restored.path == str(tmp_path / "step-000000000003")
