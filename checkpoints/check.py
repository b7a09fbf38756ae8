"""What a CheckpointManager may be asked for: each rule is checked once, when it is made."""

from __future__ import annotations

from .errors import CheckpointError
from .exchange import Store


def check_arguments(
    rank: int,
    world_size: int,
    store: Store | None,
    keep_last: int,
    keep_every: int | None,
    commit_timeout_seconds: float,
) -> None:
    if not 0 <= rank < world_size:
        raise CheckpointError(f"rank is {rank} and world_size {world_size}; rank must be from 0 to world_size - 1")
    if world_size > 1 and store is None:
        raise CheckpointError(
            f"world_size is {world_size}; several ranks need store=, a torch.distributed store they share"
        )
    if keep_last < 1:
        raise CheckpointError(
            f"keep_last is {keep_last}; at least the newest checkpoint is kept, so it must be 1 or more"
        )
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every is {keep_every}; it must be 1 or more, or None")
    if commit_timeout_seconds <= 0:
        raise CheckpointError(f"commit_timeout_seconds is {commit_timeout_seconds}; it must be positive")
