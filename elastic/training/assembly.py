"""Puts together what a round needs: checks against the world, device, process group, data, model, optimizer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from elastic.errors import JobFailedError, UsageError
from elastic.training import seeding
from elastic.training.batching import Batching, deal
from elastic.training.loader import name_of
from elastic.training.sampler import Sampler
from elastic.training.session import Session
from elastic.training.task import MapDataset, Task
from elastic.training.trainer_config import TrainerConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training data and the rules by which they become steps."""

    dataset: MapDataset
    batching: Batching
    sampler: Sampler
    fingerprint: str
    total_steps: int

    def new_sampler(self) -> Sampler:
        """A sampler for another reader: each keeps the block of the order it reads in."""
        return self.sampler.clone()


def choose_device(config: TrainerConfig, session: Session) -> torch.device:
    """This rank's device.

    Raises:
        UsageError: a GPU is asked for, and there is none for this local rank.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if session.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {session.local_rank} has no GPU: {torch.cuda.device_count()} are visible; "
            "start fewer workers per node, or set device='cpu'"
        )
    device = torch.device("cuda", session.local_rank)
    torch.cuda.set_device(device)
    return device


def check_world(config: TrainerConfig, session: Session) -> None:
    """Relations between the settings and the world they meet.

    Raises:
        UsageError: they cannot work together.
    """
    world = session.world_size
    if config.parallel != "ddp" and world > 1:
        raise UsageError(
            f"parallel {config.parallel!r} runs in one process, and the world has {world}; "
            "start one worker, or use parallel='ddp'"
        )
    micro_batches = -(-config.global_batch_size // config.micro_batch_size)
    most = deal(micro_batches, 0, world)[1]
    if config.static_graph and most > 1:
        raise UsageError(
            f"static_graph does not work with gradient accumulation, and a rank runs {most} micro-batches per step; "
            "drop static_graph, or raise micro_batch_size"
        )
    if micro_batches < world and session.rank == 0:
        logger.warning(
            "a step has %d micro-batches for %d ranks: some add nothing; lower micro_batch_size, or use fewer ranks",
            micro_batches,
            world,
        )


@contextmanager
def process_group(config: TrainerConfig, session: Session, device: torch.device) -> Iterator[None]:
    """The default group, made and taken down here unless the program has one already."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() != session.world_size:
            raise UsageError(
                f"the process group has {dist.get_world_size()} ranks and the session {session.world_size}; "
                "make the group from the launcher's environment, or let the Trainer make it"
            )
        yield
        return
    if session.world_size == 1:
        yield
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.collective_timeout_seconds),
        rank=session.rank,
        world_size=session.world_size,
    )
    try:
        yield
    finally:
        session.leave_group()
        dist.destroy_process_group()  # a process that exits with an open gloo group may die by SIGABRT


def make_data(task: Task, config: TrainerConfig) -> Data:
    """The dataset, named and cut into steps.

    Raises:
        JobFailedError: it is empty, or drop_last leaves nothing of it.
    """
    dataset = task.dataset()
    size = len(dataset)
    if size == 0:
        raise JobFailedError(f"the dataset {type(dataset).__name__} is empty (len() is 0); give it at least one item")
    batching = Batching(
        dataset_size=size,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        drop_last=config.drop_last,
    )
    if batching.steps_per_epoch == 0:
        raise JobFailedError(
            f"the dataset has {size} items and drop_last leaves out batches smaller than global_batch_size "
            f"{config.global_batch_size}: nothing is left; lower the batch, or set drop_last=False"
        )
    fingerprint = task.fingerprint(dataset)
    if fingerprint is None:
        fingerprint = name_of(dataset, config)
    return Data(
        dataset=dataset,
        batching=batching,
        sampler=Sampler(size=size, seed=config.seed, shuffle=config.shuffle),
        fingerprint=fingerprint,
        total_steps=config.steps or batching.steps_per_epoch * (config.epochs or 0),
    )


def make_model(task: Task, config: TrainerConfig, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model on its device and its optimizer, the same on every rank and whatever the world."""
    seeding.seed_all(seeding.derive(config.seed, seeding.MODEL))
    model = task.model().to(device)
    return model, task.optimizer(model)
