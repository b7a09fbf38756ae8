"""Read one checkpoint into fresh tensors, verifying it on the way. Any number of shards, any world size."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from .errors import CheckpointMismatchError, CorruptCheckpointError
from .form import flatten
from .manifest import Manifest, Piece, TensorEntry
from .shards import read_shard
from .storage import Readable
from .tree import Nested, dtype_name, unflatten

_MOST_THREADS = 4
_HUGE_FROM_BYTES = 4 << 20
_MADV_HUGEPAGE = 14
_MOST_LISTED = 20


def load(storage: Readable, directory: str, manifest: Manifest, *, readers: int = 1) -> Nested:
    """The state in `directory`, as fresh CPU tensors. `readers` processes share this machine's processors.

    Raises:
        CorruptCheckpointError: it did not verify.
    """
    own = {t.name: _allocate(t) for t in manifest.tensors if t.same_as is None}
    buffers = [_bytes_of(own[t.name]) if t.same_as is None else memoryview(b"") for t in manifest.tensors]

    def destination(piece: Piece) -> memoryview:
        itemsize = manifest.tensors[piece.tensor].itemsize
        return buffers[piece.tensor][piece.begin * itemsize : piece.end * itemsize]

    threads = max(1, min(_MOST_THREADS, len(manifest.files), (os.cpu_count() or 1) // readers))
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
        reads = [
            pool.submit(read_shard, storage, directory, manifest, file, destination)
            for file in range(len(manifest.files))
        ]
        for read in reads:
            read.result()
    tensors = {t.name: own[t.same_as or t.name] for t in manifest.tensors}
    return unflatten(manifest.state, tensors)


def _allocate(entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"{entry.name} has dtype {entry.dtype}, which this version of torch does not have")
    tensor = torch.empty(entry.shape, dtype=dtype)
    size = tensor.numel() * tensor.element_size()
    if size >= _HUGE_FROM_BYTES:  # the first touch of small pages would take longer than the read
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory; whoever holds it must hold the tensor as well."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def compare(manifest: Manifest, like: Nested) -> None:
    """Check that the checkpoint's tensors under each top-level key of `like` are those of `like`.

    Raises:
        CheckpointMismatchError: lists missing, extra and differing tensors.
    """
    _, live = flatten(like)
    wanted = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in live.items()}
    top = {str(key) for key in like} if isinstance(like, dict) else None
    found = {t.name: (t.dtype, t.shape) for t in manifest.tensors if top is None or t.name.split("/", 1)[0] in top}
    problems = _listed("missing in the checkpoint", [n for n in wanted if n not in found])
    problems += _listed("only in the checkpoint", [n for n in found if n not in wanted])
    problems += _listed("differing", _differing(wanted, found))
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint of step {manifest.step} does not fit the live state: {'; '.join(problems)}. Restore it "
            "with the model and optimizer it was made from, or start in another directory"
        )


def _differing(
    wanted: Mapping[str, tuple[str, tuple[int, ...]]], found: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[str]:
    return [
        f"{name} ({found[name][0]} {list(found[name][1])} in the checkpoint, {dtype} {list(shape)} live)"
        for name, (dtype, shape) in wanted.items()
        if name in found and found[name] != (dtype, shape)
    ]


def _listed(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return [f"{title}: {', '.join(names[:_MOST_LISTED])}{more}"]
