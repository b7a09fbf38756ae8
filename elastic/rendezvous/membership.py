"""The contract between an agent and whatever forms its rounds.

The agent calls the methods from its one loop; none of them blocks. What changes is told through the callback given to
`open`, from any thread, and then read from `view()`. Two fulfil it: `standalone.Standalone` for one node without any
server, and `member.Member`, the node's part on a store, for many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from elastic.errors import ElasticError
from elastic.rendezvous.round import Node, Round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A node that is there and is not a member, and why."""

    node_id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What this node knows of the job, from memory."""

    round: Round | None  # the newest of an incarnation that concerns this node
    nodes: tuple[Node, ...] = ()  # as far as they are known here: all on the leader, else at least this one
    waiting: tuple[Waiting, ...] = ()
    restarts_used: int = 0
    restarts_limit: int = 0
    restart_window_seconds: float = 0.0
    node_id: str = ""  # this node's, as it was granted: a live duplicate of `b` is `b-2`
    node_rank: int | None = None  # this node's in `round`; None: it is no member
    incarnation: str = ""
    is_leader: bool = False
    is_spare: bool = False  # there are MAX members without it
    is_expelled: bool = False  # its last round is over for it, lease lost or left out: stop the workers, join anew
    drain_wanted: bool = False  # the store does not answer: drain while the lease lasts
    outcome: str = ""  # of the closed job, where that concerns this node: succeeded or failed
    exit_code: int = 0  # of a failed job
    error: ElasticError | None = None  # this node cannot go on; says the exit code

    @property
    def store_addr(self) -> str:
        """Where the workers of the round find its store."""
        return self.round.store_addr if self.round else ""

    @property
    def store_port(self) -> int:
        return self.round.store_port if self.round else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """Why a round ends early."""

    cause: str
    charged: bool  # takes from the restart budget; what the node did to itself (frozen, fenced) does not
    progressed: bool  # the round had applied a new step before: the next one starts without a pause
    fatal: bool = False  # a retry would fail again: the job closes as failed
    consequence: bool = False  # it looks like the loss of a peer (a communication error)
    exit_code: int = 1  # of the job, if it ends with this
    seconds: float = 0.0  # from the failure to this word of it


class Membership(Protocol):
    """What an agent may ask of its rendezvous."""

    def open(self, on_change: Callable[[], None]) -> None:
        """Begin; `on_change` is called after each change of `view()`."""

    def join(self, *, after: int, store_port: int, ready: bool = True) -> None:
        """Ask to be in the next round; the workers of round `after` are gone (0: there were none).

        A node that is not `ready` is let into a running job only once it has said so; a first round does not wait.
        """

    def ready(self) -> None:
        """The standbys are warm."""

    def announce(self, breakage: Breakage) -> None:
        """The current round is broken: a worker of this node failed."""

    def done(self) -> None:
        """This node's workers have finished the training; the round closes when all members say so.

        If a peer fails before that, the round breaks, and this node is to join again.
        """

    def leaving(self) -> None:
        """This node has been asked to go: the round drains. `leave` follows once its workers are gone."""

    def leave(self, *, outcome: str) -> None:
        """This node goes; its workers are gone."""

    def view(self) -> View:
        """The newest state, from memory."""

    def pump(self, now: float) -> float | None:
        """Do what is due at the monotonic time `now`; returns when to be called again, None for never."""

    def fence(self, now: float) -> float:
        """Monotonic time until which this node's workers may live, given a finished pass of the loop at `now`."""

    def close(self) -> None:
        """Release everything; idempotent."""
