"""Pure: (seed, epoch, position) -> items of the dataset, the same whatever the world size, torch version or history.

The order of an epoch is a keyed permutation computed item by item: nothing is shuffled, stored or replayed, so
resuming at any position of a dataset of any size costs nothing. It is a generalised Feistel network on a grid of about
sqrt(n) x sqrt(n) cells (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); the few cells beyond n are
walked through.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

Indices = NDArray[np.uint64]


def _scramble(values: Indices) -> Indices:
    """The finaliser of splitmix64: every input bit changes about half of the output bits."""
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    scrambled: Indices = values ^ (values >> _SHIFTS[2])
    return scrambled


class EpochOrder:
    """The order of one epoch: position in the epoch -> index in the dataset, a permutation of range(size)."""

    def __init__(self, *, size: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self._size, self._shuffle = size, shuffle
        rows = int(np.ceil(np.sqrt(float(size)))) if size else 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-size // rows))
        digest = hashlib.shake_128(f"elasticd order {seed} {epoch}".encode()).digest(16 * _ROUNDS)
        self._keys = np.frombuffer(digest, dtype="<u8").reshape(_ROUNDS, 2)

    def indices(self, start: int, stop: int) -> list[int]:
        """The items at positions [start, stop) of this epoch."""
        if not self._shuffle:
            return list(range(start, stop))
        cells = self._permute(np.arange(start, stop, dtype=np.uint64))
        # Walking on from a cell beyond the dataset until one inside is reached keeps this a permutation of the inside.
        while (outside := cells >= self._size).any():
            cells[outside] = self._permute(cells[outside])
        return [int(i) for i in cells]

    def _permute(self, cells: Indices) -> Indices:
        row, column = cells // self._columns, cells % self._columns
        for row_key, column_key in self._keys:
            row = (row + _scramble(column + row_key) % self._rows) % self._rows
            column = (column + _scramble(row + column_key) % self._columns) % self._columns
        permuted: Indices = row * self._columns + column
        return permuted


class Sampler:
    """Orders of the epochs, read in blocks: a step's few items cost a list slice instead of a hundred numpy calls."""

    _BLOCK = 4096

    def __init__(self, *, size: int, seed: int, shuffle: bool = True) -> None:
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._order = EpochOrder(size=size, seed=seed, epoch=0, shuffle=shuffle)
        self._epoch = 0
        self._block: list[int] = []
        self._block_start = 0

    def clone(self) -> Sampler:
        """The same orders, read independently."""
        return Sampler(size=self._size, seed=self._seed, shuffle=self._shuffle)

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """The items at positions [start, stop) of `epoch`."""
        if epoch != self._epoch:
            self._order = EpochOrder(size=self._size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._epoch, self._block = epoch, []
        if start < self._block_start or stop > self._block_start + len(self._block):
            self._block_start = start
            self._block = self._order.indices(start, min(max(stop, start + self._BLOCK), self._size))
        return self._block[start - self._block_start : stop - self._block_start]
