"""Simulated agents of ours: real members on real etcd, each under as much of an agent as has no workers.

An agent has no thread of its own: it acts in the callback that the member's thread makes after each change. The agents
of a process share one connection to etcd, for a connection each would measure the making of connections.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Mapping

from elastic.rendezvous.connect import member_on
from elastic.rendezvous.etcd_config import Counters, EtcdConfig
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.identity import own_identity
from elastic.rendezvous.leader_view import Rules
from elastic.rendezvous.participant import Settings
from elastic.rendezvous.records import Keys
from elastic.rendezvous.round import Limits, Node, Phase
from elastic.rendezvous.store import Store
from tests.bench.rendezvous.fleet import Share
from tests.bench.rendezvous.meter import Metered
from tests.bench.rendezvous.sightings import Sightings

_STACK_BYTES = 512 << 10  # four threads for each of hundreds of agents
_TIMEOUT_SECONDS = 60.0  # of a call: here hundreds of nodes share a core, and an answer may have to wait for its turn


class Agent:
    """One node. `changed` is its whole loop."""

    def __init__(self, store: Store, number: int, settings: Settings, run_id: str, sightings: Sightings) -> None:
        self.name = settings.node.node_id
        self.member = member_on(store, run_id=run_id, settings=settings, join_timeout_seconds=600.0)
        self._port = 20_000 + number  # of the store that it would hold open
        self._sightings = sightings
        self._running = self._stopped = 0
        self.is_lost = False
        self.expulsions = 0

    def join(self) -> None:
        self.member.open(self.changed)
        self.member.join(after=0, store_port=self._port)

    def changed(self) -> None:
        """From the member's thread."""
        view = self.member.view()
        current = view.round
        if self.is_lost or current is None:
            return
        if view.is_expelled and self._stopped < self._running:
            self.expulsions += 1
            self._stop(self._running)
        elif view.node_rank is not None and current.phase is Phase.RUNNING and current.number > self._running:
            self._running = current.number
            self._sightings.note(len(current.members))
        elif current.phase is not Phase.RUNNING and self._stopped < self._running == current.number:
            self._stop(current.number)

    def _stop(self, number: int) -> None:
        self._stopped = number
        self.member.join(after=number, store_port=self._port)


class Agents:
    """See `fleet.Party`."""

    def __init__(self, share: Share) -> None:
        threading.stack_size(_STACK_BYTES)
        self._share = share
        self._keys = Keys(share.run_id)
        self._counters = Counters()
        self._sightings = Sightings()
        self._store = open_store(EtcdConfig(endpoints=(("127.0.0.1", share.port),), timeout_seconds=_TIMEOUT_SECONDS))
        rules = Rules(
            limits=Limits(min_nodes=1, max_nodes=share.total),
            last_call_seconds=600.0,  # the first round waits for all
            settle_seconds=0.0,
            ttl_seconds=share.ttl_seconds,
        )
        identity = own_identity()
        self._agents = [
            Agent(
                Metered(self._store.sharing(), self._counters, self._keys),
                number,
                Settings(
                    node=Node(node_id=f"node{number:04}", addr="127.0.0.1", slots=8),
                    identity=dataclasses.replace(identity, token=f"{number:08x}"),
                    rules=rules,
                    ttl_seconds=share.ttl_seconds,
                ),
                share.run_id,
                self._sightings,
            )
            for number in share.numbers
        ]

    def join(self) -> None:
        for agent in self._agents:
            agent.join()

    def lose(self) -> float:
        """Revoking its lease is what etcd does when it ends; the agent itself is frozen by then."""
        victim = next(agent for agent in self._agents if not agent.member.view().is_leader)
        victim.is_lost = True
        key = self._keys.node(victim.name)
        lease = self._store.read(key).entries[key].lease
        began = time.monotonic()
        self._store.revoke(lease)
        return began

    def resume(self) -> None:
        """The round's key has told them."""

    def formed(self, members: int, seconds: float) -> float | None:
        return self._sightings.wait(members, sum(not agent.is_lost for agent in self._agents), seconds)

    def counts(self) -> Mapping[str, int]:
        expulsions = sum(agent.expulsions for agent in self._agents)
        return Counter(self._store.counters()) + Counter(self._counters.snapshot()) + Counter(expulsions=expulsions)
