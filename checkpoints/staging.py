"""Buffers that a save copies to, as the image of the shard file: pre-faulted, page-aligned, kept between saves.

`Buffer` owns the mapping and its registration with CUDA; what lies below differs: private memory here, a file in shared
memory in `slot.py`.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any

import torch

from .storage import PAGE_BYTES

if TYPE_CHECKING:
    from .image import Image

GROWTH = 1.05  # a state that grows a little from save to save does not re-allocate each time
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise, Linux 5.14


class Buffer(abc.ABC):
    """Warm memory: a copy into fresh pages takes seven times as long."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = None
        self._registered = False
        self.image: Image | None = None  # what a snapshot knows of the memory; goes with it

    @abc.abstractmethod
    def _open(self, size_bytes: int) -> mmap.mmap:
        """Whole pages, at least as much as asked for. Raises: OSError."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """At least `size_bytes` of warm memory as a tensor of bytes; the same memory as before when that suffices."""
        if self._tensor is None or self._tensor.numel() < size_bytes:
            self.free()
            self._map = self._open((-(-int(size_bytes * GROWTH) // PAGE_BYTES) + 1) * PAGE_BYTES)
            self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._tensor[:size_bytes]

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from a device run without blocking. Once per allocation."""
        if self._registered or self._tensor is None:
            return
        status = _cuda_runtime().cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)
        self._registered = int(status) == 0

    def view(self, size_bytes: int, start: int = 0) -> memoryview:
        """`size_bytes` from `start` as raw memory. Release it before `free` or the next larger `allocate`."""
        if self._map is None:
            raise ValueError("nothing is staged")
        return memoryview(self._map)[start : start + size_bytes]

    def free(self) -> None:
        if self._registered and self._tensor is not None:
            _cuda_runtime().cudaHostUnregister(self._tensor.data_ptr())
        self._registered = False
        self._tensor = self.image = None
        self._map = None  # unmapped when the last view of it is gone


class StagingBuffer(Buffer):
    """Private memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._warming: threading.Thread | None = None

    def warm(self, size_bytes: int) -> None:
        """Reserve in the background what the first save will need, so that it does not wait for fresh pages."""
        self._join()
        self._warming = threading.Thread(
            target=self.allocate, args=(size_bytes,), name="checkpoint-prefault", daemon=True
        )
        self._warming.start()

    def reserve(self, size_bytes: int) -> torch.Tensor:
        """`allocate`, once the warming is done."""
        self._join()
        return self.allocate(size_bytes)

    def close(self) -> None:
        self._join()
        self.free()

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def _open(self, size_bytes: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        if not prefault(memory):
            torch.frombuffer(memory, dtype=torch.uint8).zero_()
        return memory


def prefault(memory: mmap.mmap, *, for_writing: bool = True) -> bool:
    """Touch every page without changing it; False where the kernel cannot.

    Without the interpreter's lock, which mmap's own madvise would hold for the whole time.
    """
    first = ctypes.c_char.from_buffer(memory)
    address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(memory))
    return bool(ctypes.CDLL(None).madvise(address, size, _POPULATE_WRITE if for_writing else _POPULATE_READ) == 0)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
