"""Which rank writes what, and shard files: plain safetensors whose header is padded to a page.

`partition` and `layout` are pure. Reading verifies while it reads: the file's checksum, and that its header is the one
that the manifest implies. Imports no torch: tensors are named ranges of bytes here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import strict
from .errors import CorruptCheckpointError
from .manifest import DTYPES, FileEntry, Hasher, Manifest, Piece, TensorEntry
from .storage import PAGE_BYTES, Readable

SMALLEST_CUT_BYTES = 64 << 10  # smaller tensors are not worth cutting
READ_CHUNK_BYTES = 1 << 20  # hashed while it is still in the processor's cache
_LENGTH = struct.Struct("<Q")

Destination = Callable[[Piece], memoryview]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One shard file: its header, where each piece lies, its size."""

    header: bytes
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]  # of each piece, from the start of the file
    size_bytes: int


def partition(tensors: Sequence[TensorEntry], writers: int) -> tuple[Piece, ...]:
    """Cut the tensors, laid end to end, into `writers` shares of equal bytes; pieces come by tensor and element.

    Wide elements are laid first, so that every piece lies at a multiple of its element size. Shares differ by less than
    `SMALLEST_CUT_BYTES`, because small tensors are not cut. Tensors without elements, and those that share another's
    memory, have no pieces.
    """
    order = sorted((i for i, t in enumerate(tensors) if t.stored_bytes), key=lambda i: -tensors[i].itemsize)
    total = sum(tensors[i].stored_bytes for i in order)
    bounds = [total * writer // writers for writer in range(writers + 1)]
    pieces, start = [], 0
    for index in order:
        tensor = tensors[index]
        cuts = [_cut(tensor, bound - start) for bound in bounds]
        pieces += [
            Piece(tensor=index, file=writer, begin=cuts[writer], end=cuts[writer + 1])
            for writer in range(writers)
            if cuts[writer] < cuts[writer + 1]
        ]
        start += tensor.stored_bytes
    return tuple(sorted(pieces, key=lambda piece: (piece.tensor, piece.begin)))


def _cut(tensor: TensorEntry, offset_bytes: int) -> int:
    """The element of `tensor` at which a share that begins `offset_bytes` into it begins."""
    if tensor.stored_bytes < SMALLEST_CUT_BYTES:
        return tensor.elements if offset_bytes > tensor.stored_bytes // 2 else 0
    return min(max(offset_bytes // tensor.itemsize, 0), tensor.elements)


def layout(tensors: Sequence[TensorEntry], pieces: Sequence[Piece], file: int) -> Layout:
    """The shard file number `file`. The header is padded with spaces, which the format allows, to whole pages."""
    mine = tuple(
        sorted((p for p in pieces if p.file == file), key=lambda p: (-tensors[p.tensor].itemsize, p.tensor, p.begin))
    )
    entries, offset = _entries(tensors, mine)
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode("utf-8")
    padded = -(-(_LENGTH.size + len(text)) // PAGE_BYTES) * PAGE_BYTES
    header = _LENGTH.pack(padded - _LENGTH.size) + text.ljust(padded - _LENGTH.size)
    offsets = tuple(padded + entry["data_offsets"][0] for entry in entries.values())
    return Layout(header=header, pieces=mine, offsets=offsets, size_bytes=padded + offset)


def _entries(tensors: Sequence[TensorEntry], pieces: Sequence[Piece]) -> tuple[dict[str, Any], int]:
    """The header's entries and the bytes of data they describe."""
    entries: dict[str, Any] = {}
    offset = 0
    for piece in pieces:
        tensor = tensors[piece.tensor]
        whole = piece.begin == 0 and piece.end == tensor.elements
        name = tensor.name if whole else f"{tensor.name}~{piece.begin}-{piece.end}"
        shape = tensor.shape if whole else (piece.end - piece.begin,)
        end = offset + (piece.end - piece.begin) * tensor.itemsize
        entries[name] = header_entry(tensor.dtype, shape, offset, end)
        offset = end
    return entries, offset


def header_entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """One safetensors entry; a dtype that the format lacks is written as its parts, along one more dimension."""
    itemsize, stored, stored_itemsize = DTYPES[dtype]
    parts = [] if itemsize == stored_itemsize else [itemsize // stored_itemsize]
    return {"dtype": stored, "shape": [*shape, *parts], "data_offsets": [begin, end]}


def read_shard(storage: Readable, directory: str, manifest: Manifest, file: int, destination: Destination) -> None:
    """Read one shard into what `destination` gives for each piece, and verify it on the way.

    Raises:
        CorruptCheckpointError: it cannot be read, its header is not that of the manifest, or its checksum differs.
            What was filled so far is garbage then.
    """
    entry = manifest.files[file]
    expected = layout(manifest.tensors, manifest.pieces, file)
    data_bytes = expected.size_bytes - len(expected.header)
    with _verified(storage, directory, entry) as (stream, hasher):
        if _read_header(stream, hasher, entry.bytes, data_bytes) != _parse_header(expected.header):
            raise CorruptCheckpointError(f"{entry.name} is not the shard that the manifest describes")
        for piece in expected.pieces:
            _fill(stream, destination(piece), hasher, entry.name)


def copy_shard(storage: Readable, directory: str, entry: FileEntry, target: memoryview) -> None:
    """Read one shard as it is into `target`, which has its size. Raises as `read_shard` does."""
    with _verified(storage, directory, entry) as (stream, hasher):
        _fill(stream, target, hasher, entry.name)


def verify_shard(storage: Readable, directory: str, manifest: Manifest, file: int) -> None:
    """Read one shard for its checksum alone. Raises as `read_shard` does."""
    scratch = memoryview(bytearray(READ_CHUNK_BYTES))
    with _verified(storage, directory, manifest.files[file]) as (stream, hasher):
        while count := stream.readinto(scratch):
            hasher.update(scratch[:count])


@contextlib.contextmanager
def _verified(storage: Readable, directory: str, entry: FileEntry) -> Iterator[tuple[Any, Hasher]]:
    """A shard's stream and hasher; whoever feeds one from the other has all of the right bytes when this ends."""
    hasher = Hasher()
    try:
        with storage.open(storage.join(directory, entry.name)) as stream:
            yield stream, hasher
            if stream.read(1):
                raise CorruptCheckpointError(f"{entry.name} is longer than the manifest says")
    except OSError as exc:
        raise CorruptCheckpointError(f"{entry.name} cannot be read: {exc}") from exc
    if hasher.result() != entry.checksum:
        raise CorruptCheckpointError(f"the checksum of {entry.name} is not that of the manifest: damaged or foreign")


def _read_header(stream: Any, hasher: Hasher, file_bytes: int, data_bytes: int) -> Any:
    prefix = memoryview(bytearray(_LENGTH.size))
    _fill(stream, prefix, hasher, "its header")
    (length,) = _LENGTH.unpack(prefix)
    if length > file_bytes - data_bytes - _LENGTH.size:
        raise CorruptCheckpointError(
            f"a shard's header claims {length} bytes in a file of {file_bytes}, {data_bytes} of them data"
        )
    text = memoryview(bytearray(length))
    _fill(stream, text, hasher, "its header")
    return _parse_header(bytes(prefix) + bytes(text))


def _parse_header(header: bytes) -> Any:
    try:
        return strict.loads(header[_LENGTH.size :])
    except ValueError as exc:
        raise CorruptCheckpointError(f"a shard's header is not JSON: {exc}") from exc


def _fill(stream: Any, target: memoryview, hasher: Hasher, what: str) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done : done + READ_CHUNK_BYTES])
        if not count:
            raise CorruptCheckpointError(f"{what} ends {len(target) - done} bytes early")
        hasher.update(target[done : done + count])
        done += count
