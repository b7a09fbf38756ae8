"""Simulated agents of ours: real participants on real etcd, each under as much of an agent as has no workers.

The agents of a process share one connection to etcd, for a connection each would measure the making of connections, and
the threads of one loop, which renews their leases as well. Each has its own watches, which etcd tells one by one; they
come on the connection's one stream, as all watches of a connection do.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping

from elastic.rendezvous.etcd_config import Counters, EtcdConfig
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.identity import own_identity
from elastic.rendezvous.leader_view import Rules
from elastic.rendezvous.lease import LeaseKeeper
from elastic.rendezvous.participant import Participant, Settings
from elastic.rendezvous.records import Keys
from elastic.rendezvous.round import Limits, Node, Phase
from elastic.rendezvous.store import Lease, Store
from tests.bench.rendezvous.fleet import Share
from tests.bench.rendezvous.loop import Loop
from tests.bench.rendezvous.meter import Metered
from tests.bench.rendezvous.sightings import Sightings

_TIMEOUT_SECONDS = 60.0  # of a call: here hundreds of nodes share a core, and an answer may have to wait for its turn
_THREADS = 4  # of the loop: so many calls are in flight at once; more of them wait for one another, and for one lock


class Agent:
    """One node. `_act` is its whole loop."""

    def __init__(
        self, store: Store, number: int, keys: Keys, settings: Settings, loop: Loop, sightings: Sightings
    ) -> None:
        self.name = settings.node.node_id
        self._store = store
        self._loop = loop
        self._port = 20_000 + number  # of the store that it would hold open
        self._sightings = sightings
        self._running = self._stopped = 0
        self.is_lost = False
        self.expulsions = 0
        self._wake = loop.add(self._act)
        self._participant = Participant(
            store=store,
            keys=keys,
            settings=settings,
            make_keeper=self._make_keeper,
            clock=time.monotonic,
            wake=self._wake,
        )

    @property
    def is_leader(self) -> bool:
        return self._participant.state.is_leader

    def join(self) -> None:
        self._participant.post(lambda: self._join(0))

    def _join(self, after: int) -> None:
        self._stopped = after
        self._participant.join(after=after, store_port=self._port, ready=True)

    def _act(self) -> float | None:
        """The participant's pass, then the agent's."""
        due = self._participant.work()
        state = self._participant.state
        if state.error is not None:
            raise state.error
        current, node = state.round, state.node
        if self.is_lost or current is None:
            return due
        is_over = current.phase is not Phase.RUNNING and self._stopped < self._running == current.number
        if state.is_expelled and self._stopped < self._running:
            self.expulsions += 1
            is_over = True
        if is_over:
            self._join(self._running)
            return time.monotonic()
        is_seated = current.seat_of(node.node_id, node.join) is not None
        if is_seated and current.phase is Phase.RUNNING and current.number > self._running:
            self._running = current.number
            self._sightings.note(len(current.members))
        return due

    def _make_keeper(self, lease: Lease, on_lost: Callable[[], None]) -> LeaseKeeper:
        keeper = LeaseKeeper(self._store, lease, on_lost=on_lost)

        def renew() -> float | None:
            seconds = keeper.step()
            return None if seconds is None else time.monotonic() + seconds

        self._loop.add(renew)()
        return keeper


class Agents:
    """See `fleet.Party`."""

    def __init__(self, share: Share) -> None:
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
        self._loop = Loop(_THREADS)
        self._agents = [
            Agent(
                Metered(self._store.sharing(), self._counters, self._keys),
                number,
                self._keys,
                Settings(
                    node=Node(node_id=f"node{number:04}", addr="127.0.0.1", slots=8),
                    identity=dataclasses.replace(identity, token=f"{number:08x}"),
                    rules=rules,
                    ttl_seconds=share.ttl_seconds,
                ),
                self._loop,
                self._sightings,
            )
            for number in share.numbers
        ]

    def join(self) -> None:
        for agent in self._agents:
            agent.join()

    def lose(self) -> float:
        """Revoking its lease is what etcd does when it ends; the agent itself is frozen by then."""
        victim = next(agent for agent in self._agents if not agent.is_leader)
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
        if self._loop.failures:
            raise self._loop.failures[0]
        expulsions = sum(agent.expulsions for agent in self._agents)
        return Counter(self._store.counters()) + Counter(self._counters.snapshot()) + Counter(expulsions=expulsions)
