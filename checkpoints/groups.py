"""Writing groups: ranks that see the same files write one copy together, each group a whole one.

A shared file system makes one group, local disks one per node. Found out by experiment, with probe files, because
neither host names nor paths tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable

from .errors import CheckpointError
from .exchange import Exchange, depart
from .storage import Storage

logger = logging.getLogger(__name__)
PROBE_PREFIX = ".probe-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The leader of every rank's group: the lowest rank in it, which publishes the manifest in its directory."""

    leaders: tuple[int, ...]

    def members(self, rank: int) -> tuple[int, ...]:
        return tuple(r for r, leader in enumerate(self.leaders) if leader == self.leaders[rank])

    @property
    def other_leaders(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.leaders) - {0}))


def one_group(world_size: int) -> Groups:
    return Groups(leaders=(0,) * world_size)


def find_groups(
    storage: Storage,
    directory: str,
    exchange: Exchange,
    *,
    rank: int,
    world_size: int,
    nonce: str,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> Groups:
    """Agree on the groups. Collective; all ranks return the same or all raise.

    `check` raises a CheckpointError where the directory is not the one that is meant: nothing is written there then.

    Raises:
        CheckpointError: a rank cannot write to its directory (read-only, full), or sees files inconsistently.
        CoordinationError: a rank or the store did not answer.
    """
    if world_size == 1:
        return one_group(1)
    scope = f"groups/{nonce}"
    probes = [f"{scope}/probe/{r}" for r in range(world_size)]
    seen = [f"{scope}/seen/{r}" for r in range(world_size)]
    mine = storage.join(directory, f"{PROBE_PREFIX}{nonce}-{rank}")
    try:
        exchange.put(probes[rank], _write_probe(storage, directory, mine, check), deadline)
        errors = exchange.get(probes, deadline)
        exchange.put(seen[rank], _seen(storage, directory, nonce), deadline)
        leaders = tuple(min(ranks, default=r) for r, ranks in enumerate(exchange.get(seen, deadline)))
        depart(exchange, scope, [*probes, *seen], rank=rank, world_size=world_size, deadline=deadline)
    finally:
        with contextlib.suppress(OSError):
            storage.remove(mine)
    for other, error in enumerate(errors):
        if error is not None:
            raise CheckpointError(f"rank {other} cannot write to its checkpoint directory: {error}")
    if any(leaders[leader] != leader for leader in leaders):
        raise CheckpointError(f"ranks see each other's files in {directory} inconsistently: first of each is {leaders}")
    return Groups(leaders=leaders)


def _write_probe(storage: Storage, directory: str, path: str, check: Callable[[], None]) -> str | None:
    try:
        check()
        storage.make_directory(directory)
        storage.write(path, b"")
    except (OSError, CheckpointError) as exc:
        return str(exc)
    return None


def _seen(storage: Storage, directory: str, nonce: str) -> list[int]:
    try:
        names = storage.names(directory)
    except OSError:
        return []
    prefix = f"{PROBE_PREFIX}{nonce}-"
    return sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))
