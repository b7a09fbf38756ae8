"""Fetches the micro-batches that this rank will run, in that order, ahead of time where there are loader workers.

One stream for the whole round: it crosses epochs without a new iterator. It starts at the exact item where training
stands, so that nothing is read twice or skipped, and item i of an epoch looks the same in whichever process it is
fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from elastic.errors import ElasticError
from elastic.training import seeding
from elastic.training.fingerprint import fingerprint_of
from elastic.training.task import MapDataset
from elastic.training.trainer_config import TrainerConfig

Key = tuple[int, int]  # (epoch, index in the dataset)


class LoaderDiedError(ElasticError):
    """A loader worker is gone or gives nothing: not an error of the dataset's code, which is raised as it is."""


class SeededItems(Dataset[Any]):
    """The dataset as the loader sees it: item i is fetched under seeds made of (seed, epoch, i)."""

    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seeding.seed_all(seeding.derive(self._seed, seeding.ITEM, epoch, index))
        return self._dataset[index]


class Stream:
    """Micro-batches on `device`, one per entry of `batches`."""

    def __init__(
        self,
        dataset: MapDataset,
        batches: Iterable[list[Key]],
        *,
        collate: Callable[[Sequence[Any]], Any],
        config: TrainerConfig,
        device: torch.device,
    ) -> None:
        items = SeededItems(dataset, config.seed)
        self._device = device
        self._workers = config.loader_workers
        self._ahead: list[Any] = []
        self._iterator: Iterator[Any]
        if config.loader_workers == 0:
            self._iterator = (collate([items[key] for key in keys]) for keys in batches)
        else:
            self._iterator = iter(_loader(items, batches, collate, config, device))

    def peek(self) -> Any:
        """A copy of the next micro-batch, which is still to come."""
        self._ahead.append(self.next())
        return copy.deepcopy(self._ahead[0])

    def next(self) -> Any:
        """The next micro-batch.

        Raises:
            LoaderDiedError: a loader worker died or answered nothing in time.
            Exception: whatever the dataset raised.
        """
        if self._ahead:
            return self._ahead.pop()
        try:
            return to_device(next(self._iterator), self._device)
        except RuntimeError as error:
            text = str(error)
            if self._workers and "DataLoader" in text and ("exited unexpectedly" in text or "timed out" in text):
                raise LoaderDiedError(
                    f"a data loader process is gone or stuck ({text}); look for an out-of-memory kill, or use "
                    "loader_workers=0 to see the error in the training process"
                ) from error
            raise

    def close(self) -> None:
        """End the loader workers."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        self._iterator = iter(())


class _Named(Dataset[str]):
    """A dataset whose only item is the name of another."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, _: object) -> str:
        return fingerprint_of(self._dataset)


def name_of(dataset: MapDataset, config: TrainerConfig) -> str:
    """The dataset's fingerprint, taken in a loader worker where there are any.

    A file that a dataset opens at its first item must not be open in this process when loader workers are forked.
    """
    if config.loader_workers == 0:
        return fingerprint_of(dataset)
    loader = DataLoader(
        _Named(dataset),
        sampler=[0],
        batch_size=None,
        num_workers=1,
        multiprocessing_context=config.loader_start_method,
        timeout=config.loader_timeout_seconds,
        generator=torch.Generator(),
    )
    return str(next(iter(loader)))


def _loader(
    items: SeededItems,
    batches: Iterable[list[Key]],
    collate: Callable[[Sequence[Any]], Any],
    config: TrainerConfig,
    device: torch.device,
) -> DataLoader[Any]:
    return DataLoader(
        items,
        batch_sampler=_Planned(batches),
        collate_fn=collate,
        num_workers=config.loader_workers,
        prefetch_factor=config.loader_prefetch,
        multiprocessing_context=config.loader_start_method,
        pin_memory=device.type == "cuda",
        timeout=config.loader_timeout_seconds,
        generator=torch.Generator(),  # or it would draw from the global one
    )


class _Planned:
    """An iterator given out once, in the shape a DataLoader wants its batch sampler."""

    def __init__(self, batches: Iterable[list[Key]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self._batches)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in nested lists, tuples and dicts; on the CPU nothing is touched."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
