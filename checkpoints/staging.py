"""The staging buffer: where a save copies this rank's share to, as the image of its shard file.

This small class is the place of the memory tier: a buffer that the agent owns in shared memory comes from here too.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

import torch

from .storage import PAGE_BYTES

_GROWTH = 1.05  # a state that grows a little from save to save does not re-allocate each time
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class StagingBuffer:
    """Page-aligned, pre-faulted memory, kept between saves: a copy into fresh pages takes seven times as long."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = None
        self._registered = False
        self._warming: threading.Thread | None = None

    def warm(self, size_bytes: int) -> None:
        """Reserve in the background what the first save will need, so that it does not wait for fresh pages."""
        self._join()
        self._warming = threading.Thread(
            target=self._allocate, args=(size_bytes,), name="checkpoint-prefault", daemon=True
        )
        self._warming.start()

    def reserve(self, size_bytes: int) -> torch.Tensor:
        """At least `size_bytes` of warm memory as a tensor of bytes; the same memory as before when that suffices."""
        self._join()
        return self._allocate(size_bytes)

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        if self._tensor is None or self._tensor.numel() < size_bytes:
            self._free()
            pages = -(-int(size_bytes * _GROWTH) // PAGE_BYTES) + 1
            self._map = mmap.mmap(-1, pages * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(mmap.MADV_HUGEPAGE)
            self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
            self._prefault(self._tensor)
        return self._tensor[:size_bytes]

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from a device run without blocking. Once per allocation."""
        if self._registered or self._tensor is None:
            return
        status = _cuda_runtime().cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)
        self._registered = int(status) == 0

    def view(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` as raw memory. Release it before `close` or the next larger `reserve`."""
        if self._map is None:
            raise ValueError("nothing is staged")
        return memoryview(self._map)[:size_bytes]

    def _prefault(self, tensor: torch.Tensor) -> None:
        """Touch every page without the interpreter's lock, which mmap's own madvise would hold for the whole time."""
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        if ctypes.CDLL(None).madvise(address, size, _POPULATE_WRITE) != 0:
            tensor.zero_()

    def close(self) -> None:
        self._join()
        self._free()

    def _free(self) -> None:
        if self._registered and self._tensor is not None:
            _cuda_runtime().cudaHostUnregister(self._tensor.data_ptr())
        self._registered = False
        self._tensor = None
        self._map = None  # unmapped when the last view of it is gone


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
