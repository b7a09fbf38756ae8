"""The manifest: the JSON index of one checkpoint, and the names of files and directories.

    {"format": 1, "run_id", "incarnation", "round", "base_step", "step", "world_size", "samples", "fingerprint",
    "commit",
     "unix_time", "state": skeleton, "files": [{"name", "bytes", "checksum"}],
     "tensors": [{"name", "dtype", "shape", "pieces": [[file, begin, end], ..]} | {"name", "dtype", "shape",
     "same_as"}], "checksum": xxh3 of all the rest}

`begin` and `end` count elements of the flattened tensor. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from . import strict
from .errors import CheckpointError, CorruptCheckpointError
from .storage import Storage

FORMAT = 1
MANIFEST = "manifest.json"
ROUNDS = "rounds.json"
_STEP = re.compile(r"step-(\d{12,})", re.ASCII)
_WRITING = re.compile(r"\.writing-step-(\d{12,})-r(\d+)-\w+", re.ASCII)
_VOID = re.compile(r"\.void-step-(\d{12,})-\S+", re.ASCII)
_FILE = re.compile(r"\w[\w.-]*", re.ASCII)
_RANGES = tuple[tuple[int, int, int], ...]  # of the pieces of a tensor: file, begin, end
CHECKSUM = "xxh3_128:"

# dtype -> (itemsize, dtype in the safetensors header, its size). complex128 is written as pairs, odd float8 kinds as
# bytes.
DTYPES: Mapping[str, tuple[int, str, int]] = {
    "bool": (1, "BOOL", 1),
    "uint8": (1, "U8", 1),
    "int8": (1, "I8", 1),
    "uint16": (2, "U16", 2),
    "int16": (2, "I16", 2),
    "uint32": (4, "U32", 4),
    "int32": (4, "I32", 4),
    "uint64": (8, "U64", 8),
    "int64": (8, "I64", 8),
    "float16": (2, "F16", 2),
    "bfloat16": (2, "BF16", 2),
    "float32": (4, "F32", 4),
    "float64": (8, "F64", 8),
    "float8_e4m3fn": (1, "F8_E4M3", 1),
    "float8_e5m2": (1, "F8_E5M2", 1),
    "float8_e4m3fnuz": (1, "U8", 1),
    "float8_e5m2fnuz": (1, "U8", 1),
    "float8_e8m0fnu": (1, "U8", 1),
    "complex64": (8, "F32", 4),
    "complex128": (16, "F64", 8),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [begin, end) of tensor number `tensor`, in shard file number `file`."""

    tensor: int
    file: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the state; `same_as` names the tensor it shares its memory with, which alone has pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return 0 if self.same_as is not None else self.elements * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    bytes: int
    checksum: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of one checkpoint. `commit` is the same in the copies of all writing groups and nowhere else."""

    run_id: str
    incarnation: str
    round: int
    base_step: int
    step: int
    world_size: int
    samples: int
    fingerprint: str
    commit: str
    unix_time: float
    state: Any
    tensors: tuple[TensorEntry, ...]
    pieces: tuple[Piece, ...]
    files: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def checksum(data: bytes | memoryview) -> str:
    return CHECKSUM + xxhash.xxh3_128_hexdigest(data)


class Hasher:
    """The running checksum of a file, fed in order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.update = self._state.update

    def result(self) -> str:
        return CHECKSUM + self._state.hexdigest()


def dump(manifest: Manifest) -> bytes:
    """The manifest as the bytes of manifest.json.

    Raises:
        CheckpointError: a value is of a type that `parse` would refuse.
    """
    pieces: dict[int, list[list[int]]] = {}
    for piece in manifest.pieces:
        pieces.setdefault(piece.tensor, []).append([piece.file, piece.begin, piece.end])
    body = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    del body["pieces"]
    body["files"] = [dataclasses.asdict(file) for file in manifest.files]
    body["tensors"] = [
        {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}
        | ({"pieces": pieces.get(i, [])} if t.same_as is None else {"same_as": t.same_as})
        for i, t in enumerate(manifest.tensors)
    ]
    try:
        _from_body(body)
    except ValueError as exc:
        raise CheckpointError(f"the checkpoint of step {manifest.step} could not be read back: {exc}") from exc
    body = {"format": FORMAT, **body}
    return canonical({**body, "checksum": checksum(canonical(body))})


def parse(data: bytes) -> Manifest:
    """The inverse of `dump`.

    Raises:
        CorruptCheckpointError: it is not JSON, of another format, damaged, or its pieces do not cover its tensors.
    """
    try:
        body = strict.loads(data)
    except ValueError as exc:
        raise CorruptCheckpointError(f"{MANIFEST} is not JSON ({exc}): truncated or overwritten") from exc
    if not isinstance(body, dict):
        raise CorruptCheckpointError(f"{MANIFEST} is not a JSON object")
    if body.get("format") != FORMAT:
        raise CorruptCheckpointError(f"{MANIFEST} has format {body.get('format')!r}; this version reads {FORMAT}")
    expected = body.pop("checksum", None)
    if checksum(canonical(body)) != expected:
        raise CorruptCheckpointError(f"{MANIFEST} does not match its own checksum: damaged or edited")
    try:
        manifest = _from_body(body)
        _check_files(manifest)
        _check_tensors(manifest)
        _check_cover(manifest)
    except ValueError as exc:
        raise CorruptCheckpointError(f"{MANIFEST}: {exc}") from exc
    return manifest


def canonical(body: Mapping[str, Any]) -> bytes:
    """The text that a checksum of JSON is over."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def _from_body(body: dict[str, Any]) -> Manifest:
    tensors = body.get("tensors")
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise ValueError("tensors is no list of objects")
    pieces = []
    for index, tensor in enumerate(tensors):
        ranges = strict.convert(_RANGES, tensor.get("pieces", ()), f"tensors[{index}].pieces")
        pieces += [{"tensor": index, "file": file, "begin": begin, "end": end} for file, begin, end in ranges]
    return strict.build(Manifest, {**body, "pieces": pieces})


def _check_files(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    for name in names:
        if not _FILE.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name!r:.60} is no name of a shard")
    if len(set(names)) != len(names):
        raise ValueError("two files have the same name")


def _check_tensors(manifest: Manifest) -> None:
    owners: dict[str, TensorEntry] = {}
    for tensor in manifest.tensors:
        if tensor.name in owners:
            raise ValueError(f"two tensors have the name {tensor.name}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{tensor.name} has the unknown dtype {tensor.dtype!r:.60}")
        if math.prod(max(size, 1) for size in tensor.shape) * tensor.itemsize > strict.LARGEST:
            raise ValueError(f"{tensor.name} has a shape that no memory holds")
        owners[tensor.name] = tensor
    for tensor in manifest.tensors:
        if tensor.same_as is not None:
            owner = owners.get(tensor.same_as)
            if owner is None or (owner.same_as, owner.dtype, owner.shape) != (None, tensor.dtype, tensor.shape):
                raise ValueError(f"{tensor.name} is the same as {tensor.same_as}, which is not there or differs")


def _check_cover(manifest: Manifest) -> None:
    """Every element has its place, and there is no more of them than the files have bytes for."""
    covered = [0] * len(manifest.tensors)
    room = [file.bytes for file in manifest.files]
    for piece in manifest.pieces:
        tensor = manifest.tensors[piece.tensor]
        if piece.begin != covered[piece.tensor] or piece.end < piece.begin or piece.file >= len(room):
            raise ValueError(f"the pieces of {tensor.name} do not join")
        covered[piece.tensor] = piece.end
        room[piece.file] -= (piece.end - piece.begin) * tensor.itemsize
    for file, left in zip(manifest.files, room, strict=True):
        if left < 0:
            raise ValueError(f"the pieces in {file.name} are larger than its {file.bytes} bytes")
    for tensor, end in zip(manifest.tensors, covered, strict=True):
        elements = tensor.elements if tensor.same_as is None else 0
        if end != elements:
            raise ValueError(f"{tensor.name} is covered up to element {end} of {elements}")


def read(storage: Storage, directory: str) -> Manifest:
    """Read and check the manifest of the checkpoint in `directory`, and that its files are there in their full size.

    Raises:
        CorruptCheckpointError: with the reason; also when the directory has the name of another step.
    """
    path = storage.join(directory, MANIFEST)
    try:
        if storage.size(path) is None:
            raise CorruptCheckpointError(f"{MANIFEST} is missing")
        manifest = parse(storage.read(path))
        _check_name(directory.rpartition("/")[2], manifest.step)
        for file in manifest.files:
            size = storage.size(storage.join(directory, file.name))
            if size is None:
                raise CorruptCheckpointError(f"{file.name} is missing")
            if size != file.bytes:
                raise CorruptCheckpointError(f"{file.name} has {size} bytes instead of {file.bytes}")
    except OSError as exc:
        raise CorruptCheckpointError(f"cannot be read: {exc}") from exc
    return manifest


def is_missing(storage: Storage, directory: str) -> bool:
    """There is no manifest in `directory`; one that cannot be looked at is not missing."""
    try:
        return storage.size(storage.join(directory, MANIFEST)) is None
    except OSError:
        return False


def _check_name(name: str, step: int) -> None:
    foreign = name != step_name(step) if parse_step(name) is not None else parse_void(name) not in (None, step)
    if foreign:
        raise CorruptCheckpointError(f"its manifest is that of step {step}: renamed, or copied from {step_name(step)}")


def step_name(step: int) -> str:
    return f"step-{step:012d}"


def writing_name(step: int, round_: int, nonce: str) -> str:
    return f".writing-{step_name(step)}-r{round_}-{nonce}"


def void_name(step: int, label: str, nonce: str) -> str:
    return f".void-{step_name(step)}-{label}-{nonce}"


def parse_step(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def parse_writing(name: str) -> tuple[int, int] | None:
    """(step, round) of a directory that is being written, or was when its writer died."""
    match = _WRITING.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_void(name: str) -> int | None:
    match = _VOID.fullmatch(name)
    return int(match[1]) if match else None
