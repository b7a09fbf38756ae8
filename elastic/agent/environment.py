"""What a worker finds in its environment: torchrun's variables to the letter, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastic.agent.workers import Command
from elastic.config import JobConfig
from elastic.rendezvous.round import Round


def worker_environ(
    config: JobConfig,
    formed: Round,
    node_id: str,
    *,
    local_rank: int,
    master: tuple[str, int],
    nonce: str,
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Variables of one worker on top of the agent's own.

    `node_id` is this node's as it was granted, `master` address and port of the round's store.
    """
    ranks = formed.ranks(node_id)
    rank, world_size = ranks[local_rank], formed.world_size
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if config.virtual_local_rank else str(local_rank),
        "GROUP_RANK": str(formed.node_rank(node_id)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(len(formed.members)),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(formed.number - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": config.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "ELASTICD_ROUND": str(formed.number),
        "ELASTICD_INCARNATION": formed.incarnation,
        "ELASTICD_NODE_ID": node_id,
        "ELASTICD_NONCE": nonce,
    }
    if config.checkpoint_dir:
        environ["ELASTICD_CHECKPOINT_DIR"] = config.checkpoint_dir
    if config.checkpoint_every:
        environ["ELASTICD_CHECKPOINT_EVERY"] = config.checkpoint_every
    if config.allow_fresh_start:
        environ["ELASTICD_ALLOW_FRESH_START"] = "1"
    if "OMP_NUM_THREADS" not in inherited and config.nproc_per_node > 1:
        environ["OMP_NUM_THREADS"] = "1"  # as torchrun does: N workers with a thread per core each would fight
    if config.virtual_local_rank:
        environ["CUDA_VISIBLE_DEVICES"] = _device(local_rank, inherited.get("CUDA_VISIBLE_DEVICES"))
    return environ


def _device(local_rank: int, visible: str | None) -> str:
    if not visible:
        return str(local_rank)
    return visible.split(",")[local_rank].strip()


def job_command(config: JobConfig) -> Command:
    """What each worker runs."""
    if config.no_python:
        kind = "program"
    elif config.module:
        kind = "module"
    else:
        kind = "script"
    return Command(kind=kind, target=str(config.script), args=config.args)
