"""One checkpoint -> one plain safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
from pathlib import Path
from typing import IO, Any

from .errors import CheckpointError
from .manifest import Manifest
from .shards import header_entry, layout
from .storage import CHUNK_BYTES, FILE_MODE, Storage


def write_safetensors(
    storage: Storage, directory: str, manifest: Manifest, out: Path, prefix: str = ""
) -> tuple[int, int]:
    """Join the pieces of every tensor, the wide ones first; tied tensors are written once for each name.

    Of the tensors whose names begin with `prefix`, and without it. `out` appears whole or not at all; returns its size
    in bytes and the number of tensors.
    """
    owners = {tensor.name: index for index, tensor in enumerate(manifest.tensors)}
    chosen = [index for index, tensor in enumerate(manifest.tensors) if tensor.name.startswith(prefix)]
    order = sorted(chosen, key=lambda index: -manifest.tensors[index].itemsize)
    entries: dict[str, Any] = {}
    offset = 0
    for index in order:
        tensor = manifest.tensors[index]
        end = offset + tensor.elements * tensor.itemsize
        entries[tensor.name.removeprefix(prefix)] = header_entry(tensor.dtype, tensor.shape, offset, end)
        offset = end
    header = json.dumps({"__metadata__": {"format": "pt", "step": str(manifest.step)}, **entries}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    places = _places(manifest)
    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, FILE_MODE)) as target:
            target.write(struct.pack("<Q", len(header)) + header)
            for index in order:
                tensor = manifest.tensors[index]
                owner = index if tensor.same_as is None else owners[tensor.same_as]
                for file, start, size in places.get(owner, ()):
                    _copy_range(storage, storage.join(directory, manifest.files[file].name), start, size, target)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(out)
    except OSError as exc:
        raise CheckpointError(f"{out} could not be written: {exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return 8 + len(header) + offset, len(order)


def _places(manifest: Manifest) -> dict[int, list[tuple[int, int, int]]]:
    """(file, offset in it, bytes) of each tensor's pieces, in order of the tensor's elements."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for file in range(len(manifest.files)):
        shard = layout(manifest.tensors, manifest.pieces, file)
        for piece, offset in zip(shard.pieces, shard.offsets, strict=True):
            size = (piece.end - piece.begin) * manifest.tensors[piece.tensor].itemsize
            places.setdefault(piece.tensor, []).append((file, offset, size))
    return places


def _copy_range(storage: Storage, path: str, start: int, size: int, target: IO[bytes]) -> None:
    with storage.open(path) as source:
        source.seek(start)
        while size > 0:
            chunk = source.read(min(size, CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{path} ended early")
            target.write(chunk)
            size -= len(chunk)
