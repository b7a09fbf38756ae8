"""What a worker is told of its job when it starts: its place in the round, and where things lie."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # what torch.distributed exports, with its types

from elastic.training.environment import Every, WorkerEnvironment


class Placement:
    """The part of a session that stays as it is while the process lives; any thread."""

    def __init__(self, environment: WorkerEnvironment, *, under_agent: bool) -> None:
        self._environment, self._under_agent = environment, under_agent

    @property
    def rank(self) -> int:
        return self._environment.rank

    @property
    def local_rank(self) -> int:
        return self._environment.local_rank

    @property
    def world_size(self) -> int:
        return self._environment.world_size

    @property
    def round(self) -> int:
        """Number of the round; 1 when alone. Under plain torchrun it counts the restarts of one torchrun."""
        return self._environment.round

    @property
    def run_id(self) -> str:
        return self._environment.run_id

    @property
    def incarnation(self) -> str:
        return self._environment.incarnation

    @property
    def node_id(self) -> str:
        return self._environment.node_id

    @property
    def checkpoint_dir(self) -> str | None:
        return self._environment.checkpoint_dir

    @property
    def checkpoint_every(self) -> Every | None:
        return self._environment.checkpoint_every

    @property
    def memory_dir(self) -> str | None:
        """The agent's folder in shared memory, for a `checkpoints.MemoryTier`; None where there is none."""
        return self._environment.memory_dir

    @property
    def memory_every(self) -> int | None:
        """Steps between two checkpoints in memory, as --memory-every says."""
        return self._environment.memory_every

    @property
    def unsaved_seconds(self) -> float:
        """Since the newest commit of the rounds before this one, when it began; 0: there were none."""
        return float(self._environment.unsaved_seconds)

    @property
    def memory_rank(self) -> int:
        """This worker among the `local_world_size` that share `memory_dir`."""
        return self._environment.memory_rank

    @property
    def local_world_size(self) -> int:
        return self._environment.local_world_size

    @property
    def allow_fresh_start(self) -> bool:
        """The operator lets training begin at step 0 although there are checkpoints and none is good."""
        return self._environment.allow_fresh_start

    @property
    def under_agent(self) -> bool:
        """True when an agent of elasticd reads this worker's progress."""
        return self._under_agent

    def store(self, *, timeout_seconds: float = 300.0) -> Store | None:
        """A client of its own to the round's store, under a prefix of ours; None for a world of one without an agent.

        Each caller gets another connection: one client is one lock, and a thread that waits would block the others.
        """
        environment = self._environment
        prefix = f"elasticd/{environment.incarnation}/{environment.round}"
        if environment.store_host and environment.store_port and (self.world_size > 1 or self.under_agent):
            timeout = timedelta(seconds=timeout_seconds)
            client: Store = TCPStore(
                environment.store_host,
                environment.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            )
            return PrefixStore(prefix, client)
        if self.world_size > 1 and dist.is_initialized():
            default: Any = dist.distributed_c10d._get_default_store()
            return PrefixStore(prefix, default.clone())
        return None
