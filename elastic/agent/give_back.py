"""`elasticd give-back`, which systemd runs after the unit has stopped: what an agent that was killed still holds.

An agent that ends by itself leaves nothing. One that was killed leaves its folder, in which it noted how to reach the
store: whatever it started is killed first, and only then is its lease ended, so that the others go on at once. Needs no
torch for that: it must be quicker than the lease. What the agent held in memory comes last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from elastic.agent import memory
from elastic.agent.instance import kill_what_it_left, sweep
from elastic.agent.rescuing import Finder
from elastic.config import JobConfig
from elastic.errors import ElasticError

logger = logging.getLogger(__name__)

_NOTES = "membership.json"
_NOTED = ("run_id", "node_id", "rdzv_endpoint", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user")
_STORE_SECONDS = 3.0


def note_membership(folder: Path, config: JobConfig) -> None:
    """Called by an agent before it joins; no secret is among it."""
    if config.rdzv_backend == "etcd3":
        (folder / _NOTES).write_text(json.dumps({name: getattr(config, name) for name in _NOTED}))


def give_back(runtime: Path, environ: Mapping[str, str] = os.environ) -> None:
    """For every agent of this runtime directory that is dead. What cannot be done now ends with the lease."""

    def take_leave(folder: Path) -> None:
        if kill_what_it_left(folder):
            _end_lease(folder, environ)

    sweep(runtime, take_leave)
    memory.sweep(Finder(), environ)


def _end_lease(folder: Path, environ: Mapping[str, str]) -> None:
    try:
        notes: dict[str, str | None] = json.loads((folder / _NOTES).read_text())
    except (OSError, ValueError):  # it had no store, or was killed before it wrote of it
        return
    from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
    from elastic.rendezvous.etcd_store import open_store
    from elastic.rendezvous.ghosts import revoke_ghosts
    from elastic.rendezvous.identity import own_identity

    try:
        config = EtcdConfig(
            endpoints=parse_endpoints(str(notes["rdzv_endpoint"])),
            ca=notes["etcd_ca"],
            cert=notes["etcd_cert"],
            key=notes["etcd_key"],
            user=notes["etcd_user"],
            password=environ.get("ELASTICD_ETCD_PASSWORD"),
            timeout_seconds=_STORE_SECONDS,
        )
        with contextlib.closing(open_store(config)) as store:
            names = {"run_id": str(notes["run_id"]), "node_id": str(notes["node_id"])}
            freed = revoke_ghosts(store, **names, me=own_identity())
    except ElasticError as exc:
        logger.warning("the lease of the killed agent ends by itself: %s", exc)
        return
    for node_id in freed:
        logger.info("node %s: gave back the lease of an agent that was killed", node_id)
