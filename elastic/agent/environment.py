"""What a worker finds in its environment: torchrun's variables to the letter, and ours."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from torch.distributed.elastic.utils.api import macros

from elastic.agent.child import Birth, Command, inherited
from elastic.config import JobConfig
from elastic.rendezvous.round import Round


def lasting_environ(
    config: JobConfig, *, local_rank: int, nonce: str, agent_environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of one worker on top of the agent's own that are the same in every round: a standby is born with them.

    All that something reads while it is imported belongs here.
    """
    environ = {
        "LOCAL_RANK": "0" if config.virtual_local_rank else str(local_rank),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": config.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": agent_environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "ELASTICD_NONCE": nonce,
        **dict(config.nccl),
    }
    if config.checkpoint_dir:
        environ["ELASTICD_CHECKPOINT_DIR"] = config.checkpoint_dir
    if config.checkpoint_every:
        environ["ELASTICD_CHECKPOINT_EVERY"] = config.checkpoint_every
    if config.memory_every:
        environ["ELASTICD_MEMORY_EVERY"] = str(config.memory_every)
    if config.allow_fresh_start:
        environ["ELASTICD_ALLOW_FRESH_START"] = "1"
    if "OMP_NUM_THREADS" not in agent_environ and config.nproc_per_node > 1:
        environ["OMP_NUM_THREADS"] = "1"  # as torchrun does: N workers with a thread per core each would fight
    if config.virtual_local_rank:
        environ["CUDA_VISIBLE_DEVICES"] = _device(local_rank, agent_environ.get("CUDA_VISIBLE_DEVICES"))
    return environ


def worker_environ(
    config: JobConfig,
    formed: Round,
    node_id: str,
    *,
    local_rank: int,
    master: tuple[str, int],
    nonce: str,
    memory_dir: str | None = None,
    committed_step: int = 0,
    unsaved_seconds: float = 0.0,
    agent_environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Variables of one worker of a round on top of the agent's own.

    `node_id` is this node's as it was granted, `master` address and port of the round's store, `memory_dir` the agent's
    folder in shared memory, `committed_step` the newest that the rounds before this one have committed, and
    `unsaved_seconds` for how long it has been the newest.
    """
    rank, world_size = formed.ranks(node_id)[local_rank], formed.world_size
    return {
        **lasting_environ(config, local_rank=local_rank, nonce=nonce, agent_environ=agent_environ),
        "RANK": str(rank),
        "GROUP_RANK": str(formed.node_rank(node_id)),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(len(formed.members)),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(formed.number - 1),
        "ELASTICD_ROUND": str(formed.number),
        "ELASTICD_INCARNATION": formed.incarnation,
        "ELASTICD_NODE_ID": node_id,
        "ELASTICD_LOCAL_RANK": str(local_rank),  # LOCAL_RANK is 0 for all under --virtual-local-rank
        **({"ELASTICD_MEMORY_DIR": memory_dir} if memory_dir else {}),
        **({"ELASTICD_COMMITTED_STEP": str(committed_step)} if committed_step > 0 else {}),
        **({"ELASTICD_UNSAVED_SECONDS": str(int(unsaved_seconds))} if unsaved_seconds >= 1 else {}),
    }


def _device(local_rank: int, visible: str | None) -> str:
    if not visible:
        return str(local_rank)
    return visible.split(",")[local_rank].strip()


def births(config: JobConfig, nonce: str, keep_open: tuple[int, ...] = ()) -> dict[int, Birth]:
    """What the process of each local rank is born with, worker and standby alike."""
    command = job_command(config)
    return {
        local_rank: Birth(
            command=dataclasses.replace(command, args=tuple(macros.substitute(list(command.args), str(local_rank)))),
            environ={**inherited(), **lasting_environ(config, local_rank=local_rank, nonce=nonce)},
            launcher=_launcher(config, local_rank),
            keep_open=keep_open,
        )
        for local_rank in range(config.nproc_per_node)
    }


def _launcher(config: JobConfig, local_rank: int) -> tuple[str, ...]:
    """The command prefix that binds a worker to its NUMA node; empty without --numa-binding."""
    if config.numa_binding is None:
        return ()
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(config.numa_binding))
    return tuple(binding._maybe_wrap_command_args_with_numa_binding((), gpu_index=local_rank, numa_options=options))


def job_command(config: JobConfig) -> Command:
    """What each worker runs."""
    if config.no_python:
        kind = "program"
    elif config.module:
        kind = "module"
    else:
        kind = "script"
    return Command(kind=kind, target=str(config.script), args=config.args)
