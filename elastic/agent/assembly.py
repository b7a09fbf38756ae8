"""A job's settings -> its membership: one node without a server, or this node's part on etcd."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import secrets
import socket
import time

from elastic import __version__
from elastic.agent.measuring import StoreMeter
from elastic.config import JobConfig, program_of, shared_settings
from elastic.errors import UsageError
from elastic.own_checkpoints import own_checkpoints
from elastic.passing import is_away, lacks_room
from elastic.rendezvous.etcd_config import endpoint_name
from elastic.rendezvous.lease import FENCE_SHARE
from elastic.rendezvous.membership import Membership
from elastic.rendezvous.round import Budget, Limits, Node
from elastic.rendezvous.standalone import Standalone

_LOOPBACK = "127.0.0.1"
_EVERY_ADDRESS = ("", "0.0.0.0", "::")
PASSWORD_VARIABLE = "ELASTICD_ETCD_PASSWORD"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A membership, and the address that peers reach this node by (empty: there are none)."""

    membership: Membership
    host: str
    meter: StoreMeter = dataclasses.field(default_factory=StoreMeter)


def make_rendezvous(
    config: JobConfig, http_port: int = 0, *, first_number: int = 1, restarted: bool = False
) -> Rendezvous:
    """Nothing is opened yet but the connection to etcd.

    `http_port`: where this agent's server listens, 0: nowhere. `first_number`: of the next round, at the least.
    `restarted`: by systemd, not by an operator.

    Raises: UsageError, StoreUnavailableError.
    """
    if config.rdzv_backend == "standalone":
        return _standalone(config, first_number, http_port)
    return _on_etcd(config, first_number, http_port, restarted)


def http_address(host: str, port: int, node_addr: str) -> str:
    """HOST:PORT as other nodes reach a server that listens at `host`; empty where they do not.

    Who listens on loopback is reached where the whole job is on loopback.
    """
    if not port:
        return ""
    if host in _EVERY_ADDRESS:
        host = node_addr
    elif _is_loopback(host) and not _is_loopback(node_addr):
        return ""
    return endpoint_name((host, port))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def highest_round(checkpoint_dir: str | None) -> int:
    """The highest round that has left a trace in the job's checkpoints.

    Raises: UsageError. OSError: their file server is away, or this host has no room.
    """
    if checkpoint_dir is None:
        return 0
    try:
        return int(own_checkpoints("catalog").highest_round(checkpoint_dir))
    except OSError as exc:
        if is_away(exc) or lacks_room(exc):
            raise
        raise UsageError(f"--checkpoint-dir {checkpoint_dir}: {exc.strerror or exc}") from exc


def _standalone(config: JobConfig, first_number: int, http_port: int) -> Rendezvous:
    is_open = config.http_host in _EVERY_ADDRESS
    http = http_address(config.http_host, http_port, socket.gethostname() if is_open else _LOOPBACK)
    membership = Standalone(
        node=Node(node_id=config.node_id, addr=_LOOPBACK, slots=config.nproc_per_node, http=http),
        incarnation=secrets.token_hex(4),
        first_number=first_number,
        budget=Budget(limit=config.max_restarts, window_seconds=config.restart_window_seconds),
        fence_seconds=FENCE_SHARE * config.lease_ttl_seconds,
        clock=time.monotonic,
    )
    return Rendezvous(membership=membership, host="")


def _on_etcd(config: JobConfig, first_number: int, http_port: int, restarted: bool) -> Rendezvous:
    """etcd3 and what it needs are imported here, so that a job on one node does without them."""
    from elastic.rendezvous.connect import member_on
    from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
    from elastic.rendezvous.etcd_store import open_store
    from elastic.rendezvous.identity import address_towards, own_address, own_identity
    from elastic.rendezvous.leader_view import Rules
    from elastic.rendezvous.participant import Settings

    endpoints = parse_endpoints(config.rdzv_endpoint)
    etcd = EtcdConfig(
        endpoints=endpoints,
        ca=config.etcd_ca,
        cert=config.etcd_cert,
        key=config.etcd_key,
        user=config.etcd_user,
        password=os.environ.get(PASSWORD_VARIABLE),
    )
    host = own_address(config.local_addr) if config.local_addr else address_towards(endpoints)
    shared = shared_settings(config)
    rules = Rules(
        limits=Limits(min_nodes=config.min_nodes, max_nodes=config.max_nodes),
        last_call_seconds=config.last_call_seconds,
        settle_seconds=config.settle_seconds,
        drain_grace_seconds=config.drain_grace_seconds,
        ttl_seconds=config.lease_ttl_seconds,
        max_restarts=config.max_restarts,
        restart_window_seconds=config.restart_window_seconds,
        settings=shared,
    )
    node = Node(
        node_id=config.node_id,
        addr=host,
        slots=config.nproc_per_node,
        first_number=first_number,
        settings=shared,
        program=program_of(config),
        http=http_address(config.http_host, http_port, host),
    )
    settings = Settings(
        node=node,
        identity=own_identity(),
        rules=rules,
        ttl_seconds=config.lease_ttl_seconds,
        version=__version__,
        restarted=restarted,
    )
    store, meter = open_store(etcd), StoreMeter()
    meter.errors = lambda: store.counters()["errors"]
    membership = member_on(
        store,
        run_id=config.run_id,
        settings=settings,
        join_timeout_seconds=config.join_timeout_seconds,
        on_renewed=meter.renewed,
    )
    return Rendezvous(membership=membership, host=host, meter=meter)
