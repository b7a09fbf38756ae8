"""Nodes of a job in one process: real Members, each under a small agent without workers, driven by the test."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.rendezvous.connect import member_on
from elastic.rendezvous.identity import own_identity
from elastic.rendezvous.leader_view import Rules
from elastic.rendezvous.member import Member
from elastic.rendezvous.membership import Breakage, View
from elastic.rendezvous.participant import Settings
from elastic.rendezvous.round import Limits, Node, Phase, Round
from elastic.rendezvous.store import Store

TTL = 2
RULES = Rules(
    limits=Limits(min_nodes=1, max_nodes=3),
    last_call_seconds=0.3,
    settle_seconds=0.1,
    drain_grace_seconds=5.0,
    ttl_seconds=TTL,
    max_restarts=3,
    restart_window_seconds=600,
    probation_window_seconds=0.0,
    settings="s",
)


DEAD_PID = 4_194_305  # above the highest that Linux gives
ENDINGS: list[threading.Thread] = []  # of nodes that vanished; to be joined at the end


class Peer:
    """A node. `act` is one pass of its agent; what it would do with workers is one number, `running`."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        rules: Rules = RULES,
        join_timeout: float = 30.0,
        ready: bool = True,
        pid: int | None = None,
        run_id: str = "job",
        program: str = "train.py 5a",
        **settings: Any,
    ) -> None:
        identity = own_identity()
        self.store = store
        self.name = name
        self.ready = ready
        self.member: Member = member_on(
            store,
            run_id=run_id,
            settings=Settings(
                node=Node(node_id=name, addr="127.0.0.1", slots=1, program=program),
                identity=dataclasses.replace(identity, pid=pid) if pid is not None else identity,
                rules=rules,
                **{"ttl_seconds": TTL, **settings},
            ),
            join_timeout_seconds=join_timeout,
        )
        self.closing: threading.Thread | None = None
        self.changes = 0
        self.running = self.started = 0
        self.drained = 0
        self.is_joining = self.is_done = self.is_gone = False
        self.history: list[tuple[int, str]] = []
        self.member.open(self._changed)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def view(self) -> View:
        return self.member.view()

    @property
    def round(self) -> Round | None:
        return self.view.round

    def act(self) -> None:
        if self.is_gone:
            return
        view = self.view
        current = view.round
        if current is not None and (not self.history or self.history[-1] != (current.number, current.phase.value)):
            self.history.append((current.number, current.phase.value))
        if self.running:
            is_over = current is None or current.number > self.running or current.phase in (Phase.BROKEN, Phase.CLOSED)
            if view.is_expelled or is_over:
                self.running = 0
            elif current is not None and current.phase is Phase.DRAINING:
                self.running, self.drained = 0, self.drained + 1
            return
        if view.outcome or view.error is not None:
            return
        if view.node_rank is not None and current is not None and current.number > self.started:
            if current.phase is Phase.RUNNING and self.member.fence(time.monotonic()) > time.monotonic():
                self.running = self.started = current.number
                self.is_joining = self.is_done = False
            elif current.phase is not Phase.RUNNING:
                self.join(self.started)
            return
        waits_for_peers = self.is_done and (current is None or current.phase is not Phase.BROKEN)
        if (view.is_expelled and not self.is_joining) or not (self.is_joining or waits_for_peers):
            self.join(self.started)

    def join(self, after: int) -> None:
        self.is_joining, self.is_done = True, False
        self.member.join(after=after, store_port=4000 + after, ready=self.ready)

    def fail(self, *, progressed: bool = True, charged: bool = True, **more: Any) -> None:
        self.member.announce(Breakage(cause=f"{self.name} failed", charged=charged, progressed=progressed, **more))
        self.running = 0

    def finish(self) -> None:
        self.running, self.is_done = 0, True
        self.member.done()

    def go(self) -> None:
        """As after a TERM: the round drains, then this node leaves."""
        self.member.leaving()
        self.running = 0
        self.leave()

    def leave(self) -> None:
        self.member.leave(outcome="drained")
        self.member.close()
        self.is_gone = True

    def vanish(self) -> None:
        """As after kill -9: nothing is said, the lease is not renewed any more."""
        self.is_gone = True
        self.running = 0
        self.store.close()
        self.closing = threading.Thread(target=self.member.close)  # what is left of it here takes a moment to give up
        self.closing.start()

    def close(self) -> None:
        if self.closing is not None:
            ENDINGS.append(self.closing)
        else:
            self.member.close()


def until(peers: list[Peer], condition: Callable[[], Any], seconds: float = 12.0) -> float:
    """Let the agents act until the condition holds; returns how long it took."""
    started = time.monotonic()
    while True:
        for peer in peers:
            peer.act()
        if condition():
            return time.monotonic() - started
        if time.monotonic() - started > seconds:
            shown = "\n".join(
                f"{p.name}: running {p.running}, {p.history[-3:]}, {p.view}" for p in peers if not p.is_gone
            )
            raise AssertionError(f"still not true after {seconds} s:\n{shown}")
        time.sleep(0.005)


def all_run(peers: list[Peer], count: int | None = None) -> Callable[[], bool]:
    """Whether these nodes train in one running round, which has `count` members."""

    def holds() -> bool:
        numbers = {peer.running for peer in peers}
        current = peers[0].round
        if len(numbers) != 1 or 0 in numbers or current is None:
            return False
        return current.phase is Phase.RUNNING and len(current.members) == (count or len(peers))

    return holds


class Job:
    """A store server and the nodes of the tests on it."""

    def __init__(self, connect: Callable[[], Store], run_id: str) -> None:
        self.connect = connect
        self.run_id = run_id
        self.peers: list[Peer] = []

    def start(self, name: str, **settings: Any) -> Peer:
        peer = Peer(self.connect(), name, run_id=self.run_id, **settings)
        self.peers.append(peer)
        return peer

    def until(self, condition: Callable[[], Any], seconds: float = 12.0) -> float:
        return until([peer for peer in self.peers if not peer.is_gone], condition, seconds)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
