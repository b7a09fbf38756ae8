"""The text as a map-style dataset of fixed windows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic.demo.text import count_windows
from elastic.errors import UsageError


class Windows(Dataset[Tensor]):
    """Window i is bytes [i * context, (i + 1) * context] of the text: its last byte is the next one's first.

    Args:
        samples: use the first so many windows only; None = all of them.

    Raises:
        UsageError: the text is too short for one window, or for `samples`.
    """

    def __init__(self, text: bytes, *, context: int, samples: int | None = None) -> None:
        windows = count_windows(text, context=context)
        if samples is not None and samples > windows:
            raise UsageError(f"--samples {samples} is more than the {windows} windows of the text; give more text")
        self._context = context
        self._size = windows if samples is None else samples
        self._bytes = torch.from_numpy(np.frombuffer(text, dtype=np.uint8)[: self._size * context + 1].copy())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:  # (context + 1,) of uint8
        start = index * self._context
        return self._bytes[start : start + self._context + 1]
