"""Random numbers that depend on what is computed, never on who computes it or what ran before.

Every micro-batch and every fetched item gets seeds of its own, so that no state of a generator has to be saved, and a
resume or a resize draws the same dropout masks and augmentations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_cuda: Any = torch.cuda  # partly untyped in torch
_MASK = (1 << 64) - 1
MODEL, MICRO_BATCH, ITEM, PROBE = 1, 2, 3, 4  # what a seed is for; the first part of `derive`


def derive(*parts: int) -> int:
    """A 64-bit seed from some whole numbers: splitmix64 folded over them."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_all(seed: int) -> None:
    """Seed python's, numpy's and torch's generators, and those of all CUDA devices that are in use: about 10 us.

    `torch.manual_seed` does the last two too, in 80 us: it visits every backend that might exist.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if _cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave all generators as they were: what runs inside has no effect on the draws outside."""
    python: Any = random.getstate()
    arrays: Any = np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if _cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
