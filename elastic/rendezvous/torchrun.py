"""The rendezvous of plain `torchrun --rdzv-backend etcd3`: torch's blocking contract on our membership.

torch's agent decides alone when to restart its workers: after a failure of its own, or when `num_nodes_waiting` says
so. Here that is the case as soon as the round is no longer running: a peer failed, was lost, leaves or joins. What
torchrun does not have, it does not get: no fence (a frozen agent's workers live on), no drain (workers are stopped),
no shared budget (`--max-restarts` counts on each node).
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore  # what torch.distributed exports, with its types
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic import values
from elastic.errors import ElasticError, NotEnoughNodesError, StoreGoneError, UsageError
from elastic.passing import begin
from elastic.rendezvous.connect import make_member
from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
from elastic.rendezvous.identity import address_towards, own_identity
from elastic.rendezvous.leader_view import Rules
from elastic.rendezvous.membership import Breakage, Membership, View
from elastic.rendezvous.participant import Settings
from elastic.rendezvous.round import Limits, Node, Phase

logger = logging.getLogger(__name__)

BACKEND = "etcd3"
_CONF: Mapping[str, Callable[[str], Any]] = {
    "lease_ttl": lambda text: _lease_ttl(values.whole_seconds(text)),
    **dict.fromkeys(("last_call", "settle", "join_timeout", "store_timeout"), values.seconds),
    **dict.fromkeys(("node_id", "ca", "cert", "key", "user"), str),
}
_SHORTEST_TTL_SECONDS = 2
_TORCHS_OWN = ("timeout", "rank")  # torchrun adds them for backends of its own
_STORE_SECONDS = 60.0
_GREETING_SECONDS = 5.0  # beyond that, for torch to say itself what is wrong
_LOOK_SECONDS = 1.0  # the view also changes by time alone
_GRACE_SECONDS = 60.0  # for peers to stop their workers: torchrun gives them 30 s


def create_handler(params: RendezvousParameters) -> TorchrunHandler:
    """The handler of one agent. Raises: UsageError."""
    endpoints = parse_endpoints(params.endpoint)
    conf = _conf(params.config)
    ttl = int(conf.get("lease_ttl", 5))
    addr = params.local_addr or address_towards(endpoints)
    join_timeout = conf.get("join_timeout", 600.0)
    rules = Rules(
        limits=Limits(min_nodes=params.min_nodes, max_nodes=params.max_nodes),
        last_call_seconds=conf.get("last_call", 5.0),
        settle_seconds=conf.get("settle", 1.0),
        drain_grace_seconds=_GRACE_SECONDS,
        ttl_seconds=ttl,
        settings=f"torchrun --nnodes={params.min_nodes}:{params.max_nodes}",
    )
    member = make_member(
        etcd=EtcdConfig(
            endpoints=endpoints,
            ca=conf.get("ca"),
            cert=conf.get("cert"),
            key=conf.get("key"),
            user=conf.get("user"),
            password=os.environ.get("ELASTICD_ETCD_PASSWORD"),
        ),
        run_id=params.run_id,
        settings=Settings(
            node=Node(node_id=conf.get("node_id") or os.uname().nodename, addr=addr, slots=1),
            identity=own_identity(),
            rules=rules,
            ttl_seconds=ttl,
        ),
        join_timeout_seconds=join_timeout,
    )
    return TorchrunHandler(
        member,
        run_id=params.run_id,
        addr=addr,
        timeout_seconds=join_timeout,
        store_seconds=conf.get("store_timeout", _STORE_SECONDS),
    )


def _conf(given: Mapping[str, Any]) -> dict[str, Any]:
    """What --rdzv-conf says, and each value as what it is. Raises: UsageError."""
    conf: dict[str, Any] = {}
    for key, value in given.items():
        if key in _TORCHS_OWN or value is None:
            continue
        if key not in _CONF:
            close = difflib.get_close_matches(key, _CONF, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UsageError(f"--rdzv-conf: unknown key {key!r}{hint}; known are {', '.join(_CONF)}")
        try:
            conf[key] = _CONF[key](str(value))
        except ArgumentTypeError as exc:
            raise UsageError(f"--rdzv-conf: {key}={value}: {exc}") from exc
    return conf


def _lease_ttl(seconds: int) -> int:
    if seconds < _SHORTEST_TTL_SECONDS:
        raise ArgumentTypeError(f"give {_SHORTEST_TTL_SECONDS} seconds or more")
    return seconds


class TorchrunHandler(RendezvousHandler):
    """Blocks in `next_rendezvous` only; all else is answered from memory and never raises."""

    def __init__(
        self,
        membership: Membership,
        *,
        run_id: str,
        addr: str,
        timeout_seconds: float,
        store_seconds: float = _STORE_SECONDS,
    ) -> None:
        self.trouble = ""  # why this node could not enter the last round that had it
        self._membership = membership
        self._run_id = run_id
        self._addr = addr
        self._timeout_seconds = timeout_seconds
        self._store_timeout = timedelta(seconds=store_seconds)
        self._changed = threading.Event()
        self._is_open = False
        self._number = 0  # the round whose workers this agent was told to start
        self._server: TCPStore | None = None  # for the round to come, then of the round if this node hosts it

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The members of the newest round, by their node ranks."""
        current = self._membership.view().round
        return tuple(member.node_id for member in current.members) if current is not None else ()

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round with this node in it; there are no workers of the last one when torch calls this."""
        if not self._is_open:
            self._is_open = True
            self._membership.open(self._changed.set)
        view = self._membership.view()
        if self._is_running(view):  # torch does not say why it restarts: its own worker failed, or it was not told yet
            self._break(f"node {view.node_id} restarts its workers")
        self._join()
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            self._changed.clear()
            view = self._membership.view()
            self._raise_end(view)
            self._membership.pump(time.monotonic())  # a member without room for its thread tries again there
            if view.is_spare:
                deadline = time.monotonic() + self._timeout_seconds
            if (info := self._enter(view)) is not None:
                return info
            if time.monotonic() >= deadline:
                raise RendezvousTimeoutError(f"no round within {self._timeout_seconds:g} s; waiting: {view.waiting}")
            self._changed.wait(_LOOK_SECONDS)

    def is_closed(self) -> bool:
        return bool(self._membership.view().outcome)

    def set_closed(self) -> None:
        cause = "closed by torchrun"
        self._membership.announce(Breakage(cause=cause, charged=False, progressed=False, fatal=True))

    def num_nodes_waiting(self) -> int:
        """Not 0: restart the workers. Only the end of the whole job is none of the workers' business."""
        view = self._membership.view()
        current = view.round
        if view.is_expelled:
            return 1
        if current is None or not self._number or current.phase is Phase.CLOSED:
            return 0
        return int(current.number != self._number or current.phase is not Phase.RUNNING)

    def shutdown(self) -> bool:
        """torch's last call, however the job ended here; peers that are not through yet go on."""
        self._membership.done()
        self._membership.leave(outcome="torchrun ends")
        self._membership.close()
        self._server = None
        return True

    def _is_running(self, view: View) -> bool:
        current = view.round
        return current is not None and current.number == self._number and current.phase is Phase.RUNNING

    def _break(self, cause: str) -> None:
        self._membership.announce(Breakage(cause=cause, charged=False, progressed=True))

    def _join(self) -> None:
        """A fresh server for each round: an old one would hand the last round's keys to the new workers."""
        self._server = TCPStore(self._addr, 0, is_master=True, wait_for_workers=False, timeout=self._store_timeout)
        self._membership.join(after=self._number, store_port=self._server.port)

    def _enter(self, view: View) -> RendezvousInfo | None:
        """The round, if it is a new one that this node can be in; one that was missed is acknowledged as stopped."""
        current = view.round
        if view.is_expelled:
            self._join()
            self._changed.wait(_LOOK_SECONDS)
            return None
        if current is None or view.node_rank is None or current.number <= self._number:
            return None
        self._number = current.number
        store = self._connect(view) if current.phase is Phase.RUNNING else None
        if store is None:
            self._join()
            return None
        logger.info("round %d: %s; node rank %d", current.number, current.cause, view.node_rank)
        return RendezvousInfo(
            store,
            view.node_rank,
            len(current.members),
            RendezvousStoreInfo(master_addr=view.store_addr, master_port=view.store_port),
        )

    def _connect(self, view: View) -> TCPStore | None:
        """The round's store; None when its host has gone meanwhile, which then is told."""
        current = view.round
        if current is None or current.store_host == view.node_id:
            return self._server
        try:
            return _client(view.store_addr, view.store_port, self._store_timeout)
        except (DistError, OSError) as exc:
            self.trouble = f"the store of node {current.store_host} does not answer node {view.node_id}"
            logger.warning("round %d: %s: %s", current.number, self.trouble, exc)
            self._break(self.trouble)
            return None

    def _raise_end(self, view: View) -> None:
        if view.outcome == "succeeded":
            raise RendezvousGracefulExitError("the job has succeeded")
        if view.outcome:
            raise RendezvousClosedError(f"the job has {view.outcome}")
        if view.error is not None:
            raise _translated(view.error)


def _client(addr: str, port: int, timeout: timedelta) -> TCPStore:
    """A client of a round's store. Its greeting obeys no timeout: where the host is frozen it is left behind in it.

    Raises: DistError; TimeoutError, or another OSError where this host has no room for a thread.
    """
    made = begin(lambda: TCPStore(addr, port, is_master=False, timeout=timeout), "elasticd-store-client")
    try:
        return made.result(timeout.total_seconds() + _GREETING_SECONDS)
    except FutureTimeoutError as exc:
        raise TimeoutError(f"no greeting from {addr}:{port} within {timeout.total_seconds():g} s") from exc


def _translated(error: ElasticError) -> RendezvousError:
    if isinstance(error, NotEnoughNodesError):
        return RendezvousTimeoutError(str(error))
    if isinstance(error, StoreGoneError):
        return RendezvousConnectionError(str(error))
    return RendezvousError(str(error))
