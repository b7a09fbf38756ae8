"""A short name for a dataset, so that a position counted in one is never applied to another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from elastic.training import seeding


def fingerprint_of(dataset: Any) -> str:
    """Length, and a hash of four items spread over the data, fetched under fixed seeds in case they are augmented."""
    size = len(dataset)
    digest = hashlib.blake2b(digest_size=12)
    with seeding.preserved_random_state():
        for index in sorted({0, size // 3, 2 * size // 3, size - 1}):
            seeding.seed_all(seeding.derive(seeding.PROBE, index))
            _feed(digest, dataset[index])
    return f"{size}-{digest.hexdigest()}"


def _feed(digest: hashlib.blake2b, item: Any) -> None:
    """Hash the content of what we know, and the type alone of what we do not (an address in a repr would change)."""
    digest.update(type(item).__name__.encode() + b"\0")
    if isinstance(item, torch.Tensor):
        digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
        digest.update(item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray) and item.dtype != object:
        digest.update(f"{item.dtype}{item.shape}".encode() + item.tobytes())
    elif isinstance(item, Mapping):
        for key in sorted(item, key=repr):
            _feed(digest, key)
            _feed(digest, item[key])
    elif isinstance(item, (list, tuple)):
        for part in item:
            _feed(digest, part)
    elif isinstance(item, (bytes, bytearray)):
        digest.update(item)
    elif isinstance(item, (str, bool, int, float, complex, np.generic)) or item is None:
        digest.update(repr(item).encode())
