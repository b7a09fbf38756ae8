"""A whole job in one thread, on a clock of its own: the world, its nodes, and the monitor of what must always hold."""

from __future__ import annotations

import random
from collections.abc import Callable

from elastic.rendezvous.identity import Identity
from elastic.rendezvous.leader_view import Rules
from elastic.rendezvous.lease import LeaseKeeper
from elastic.rendezvous.membership import Breakage
from elastic.rendezvous.participant import Participant, Settings
from elastic.rendezvous.records import Keys, NodeRecord
from elastic.rendezvous.round import Limits, Node, Phase, Round
from elastic.rendezvous.store import Lease
from tests.support.fake_store import FakeServer, FakeStore, Fault

TTL = 4
KEYS = Keys("job")


class World:
    """The store, the clock, the nodes and the monitor."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 1000.0
        self.server = FakeServer(lambda: self.now)
        least = self.draw.randint(1, 3)
        self.rules = Rules(
            limits=Limits(min_nodes=least, max_nodes=least + self.draw.randint(0, 4)),
            last_call_seconds=self.draw.choice((0.0, 1.0, 3.0)),
            settle_seconds=self.draw.choice((0.0, 0.5)),
            drain_grace_seconds=20.0,
            ttl_seconds=TTL,
            max_restarts=self.draw.choice((0, 2, 1000)),
            restart_window_seconds=self.draw.choice((20, 10_000)),
            probation_window_seconds=30.0,
            probation_seconds=1.0,
        )
        self.fault_rate = self.draw.choice((0.0, 0.02, 0.15))
        self.nodes: dict[str, SimNode] = {}
        self.monitor = Monitor(self)
        self.started = 0

    def start(self, name: str) -> None:
        self.started += 1
        self.nodes[name] = SimNode(self, name, self.started)

    def fate(self, operation: str) -> Fault | None:
        if self.draw.random() >= self.fault_rate:
            return None
        kinds = [Fault.UNAVAILABLE, Fault.LOST] + ([Fault.DELAYED] if operation == "write" else [])
        return self.draw.choice(kinds)

    def tick(self, seconds: float) -> None:
        """Time passes: wardens kill what has outlived its lease, leases end."""
        self.now += seconds
        for node in self.nodes.values():
            node.fence()
        self.server.settle()

    def let_all_work(self) -> None:
        self.server.pump()
        for node in self.draw.sample(list(self.nodes.values()), len(self.nodes)):
            node.step()
            self.monitor.look()


class SimNode:
    """One node: the real protocol under a model of an agent and its workers."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.store = FakeStore(world.server, faults=world.fate)
        self.settings = Settings(
            node=Node(node_id=name, addr="h", slots=1),
            identity=Identity(machine="m", boot="b", namespace=1, pid=10**8 + number, started=1, token=str(number)),
            rules=world.rules,
            ttl_seconds=TTL,
        )
        self.keeper: LeaseKeeper | None = None
        self.participant = Participant(
            store=self.store,
            keys=KEYS,
            settings=self.settings,
            make_keeper=self._make_keeper,
            clock=lambda: world.now,
            draw=world.draw,
        )
        self.running = 0  # the round whose workers live
        self.started = 0
        self.is_joining = False
        self.is_done = False
        self.wants_to_go = False
        self.is_gone = False
        self.ended = ""  # how its job ended
        self.due = world.now

    def _make_keeper(self, lease: Lease, on_lost: Callable[[], None]) -> LeaseKeeper:
        self.keeper = LeaseKeeper(self.store, lease, on_lost=on_lost, clock=lambda: self.world.now)
        return self.keeper

    @property
    def node_id(self) -> str:
        return self.participant.state.node.node_id

    def fence(self) -> None:
        if self.running and self.keeper is not None and self.world.now >= self.keeper.fence():
            self.running = 0

    def step(self) -> None:
        if self.is_gone:
            return
        if self.keeper is not None:
            self.keeper.step()
        self.participant.work()
        if not self.participant.state.has_left:
            self._act()
        if self.participant.state.has_left:
            self.participant.close()
            self.is_gone = True

    def kill(self) -> None:
        """Agent and workers vanish; the lease lives on."""
        self.running, self.is_gone = 0, True
        self.store.close()

    def fail(self, progressed: bool, charged: bool, consequence: bool) -> None:
        if self.running:
            self.participant.announce(
                Breakage(cause=f"{self.name} failed", charged=charged, progressed=progressed, consequence=consequence)
            )
            self.running = 0

    def finish(self) -> None:
        if self.running:
            self.running, self.is_done = 0, True
            self.participant.done()

    def drain(self) -> None:
        self.wants_to_go = True
        self.participant.leaving()

    def _act(self) -> None:
        """What `elastic.agent.decide` comes to, in few lines."""
        state = self.participant.state
        current = state.round
        seat = current.seat_of(state.node.node_id, state.node.join) if current is not None else None
        if self.running:
            over = current is None or current.number > self.running or current.phase in (Phase.BROKEN, Phase.CLOSED)
            drains = (
                self.wants_to_go
                or (self.keeper and self.keeper.in_doubt())
                or (current and current.phase is Phase.DRAINING)
            )
            if over or state.is_expelled or (drains and self.world.draw.random() < 0.5):
                self.running = 0
            return
        if state.error is not None:
            self.ended = str(state.error)
            self.participant.leave()
        elif current is not None and current.phase is Phase.CLOSED:
            self.ended = current.outcome
            self.participant.leave()
        elif self.wants_to_go:
            self.ended = "drained"
            self.participant.leave()
        elif current is not None and seat is not None and current.number > max(self.started, state.node.after):
            if current.phase is Phase.RUNNING and self.keeper is not None and self.world.now >= self.keeper.fence():
                return  # too late for workers; either the lease turns out to be lost, or it is renewed
            if current.phase is Phase.RUNNING:
                self.running = self.started = current.number
                self.is_joining = self.is_done = False
                self.world.monitor.on_start(self)
            else:
                self._join(self.started)
        else:
            waits_for_peers = self.is_done and (current is None or current.phase is not Phase.BROKEN)
            if state.is_expelled or not (self.is_joining or waits_for_peers):
                self._join(self.started)

    def _join(self, after: int) -> None:
        self.is_joining, self.is_done = True, False
        self.participant.join(after=after, store_port=1, ready=self.world.draw.random() < 0.8)
        self.participant.post(self.participant.ready)


class Monitor:
    """Sees every revision of the store, and checks what must hold."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.revision = 1
        self.round: Round | None = None
        self.members: dict[int, tuple[object, ...]] = {}
        self.nodes: dict[str, Node] = {}
        self.charges = 0
        self.answered = 0

    def on_start(self, node: SimNode) -> None:
        """No worker of an older round may live when a node starts those of a new one."""
        old = [other.name for other in self.world.nodes.values() if 0 < other.running < node.running]
        assert not old, f"round {node.running} starts while {old} run an older one"

    def look(self) -> None:
        by_revision: dict[int, list[tuple[str, str | None]]] = {}
        for event in self.world.server.events_after(self.revision):
            value = event.entry.value if event.entry is not None else None
            by_revision.setdefault(event.revision, []).append((event.key, value))
            self.revision = event.revision
        for changes in by_revision.values():
            self._check(dict(changes))

    def _check(self, changes: dict[str, str | None]) -> None:
        charged = [key for key, value in changes.items() if key.startswith(f"{KEYS.prefix}charges/") and value]
        if (text := changes.get(KEYS.round)) is not None:
            self._check_round(Round.from_json(text), bool(charged))
        for key, value in changes.items():
            if key.startswith(KEYS.nodes):
                name = key.removeprefix(KEYS.nodes)
                if value is None:
                    del self.nodes[name]
                else:
                    self.nodes[name] = NodeRecord.from_json(value).node

    def _check_round(self, new: Round, charged: bool) -> None:
        old, self.round = self.round, new
        shape = (new.incarnation, new.members, new.store_host, new.store_port)
        assert self.members.setdefault(new.number, shape) == shape, f"round {new.number} is two rounds"
        if old is not None and new.number == old.number:
            order = list(Phase)
            assert order.index(new.phase) >= order.index(old.phase), f"{old.phase} -> {new.phase}"
            assert not charged or new.phase is Phase.CLOSED
            return
        assert new.phase is Phase.RUNNING
        assert self.world.rules.limits.min_nodes <= len(new.members) <= self.world.rules.limits.max_nodes
        for member in new.members:
            node = self.nodes.get(member.node_id)
            assert node is not None, f"round {new.number} has {member.node_id}, whose lease had ended"
            assert node.join == member.join
        if old is not None:
            self._check_succession(old, new, charged)

    def _check_succession(self, old: Round, new: Round, charged: bool) -> None:
        assert new.number > old.number
        present = [m for m in old.members if (n := self.nodes.get(m.node_id)) and n.join == m.join]
        for member in present:
            node = self.nodes[member.node_id]
            assert node.after >= old.number or node.done >= old.number or (member.node_id, member.join) in new.late
        if old.incarnation != new.incarnation:
            assert old.phase is Phase.CLOSED or not present
            assert not charged
            return
        assert old.phase is not Phase.CLOSED, "a closed incarnation went on"
        everybody = len(present) == len(old.members)
        assert charged == (old.phase is Phase.BROKEN and old.charged and everybody), f"{old} -> {new}"
        live = [key for key in self.world.server.entries if key.startswith(KEYS.charges(new.incarnation))]
        assert len(live) <= self.world.rules.max_restarts
        names = [member.node_id for member in new.members]
        for rank, member in enumerate(old.members):
            if member in present and member.node_id in names and rank < len(names):
                assert names[rank] == member.node_id, "a survivor lost its rank"
