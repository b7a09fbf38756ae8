"""The contract between an agent and whatever forms its rounds.

The agent calls the methods from its one loop; none of them blocks. What changes is told through the callback given to
`open`, from any thread, and then read from `view()`. Two fulfil it: `standalone.Standalone` for one node without any
server, and the node's part on etcd for many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from elastic.rendezvous.round import Node, Round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A node that is there and is not a member, and why."""

    node_id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What this node knows of the job, from memory."""

    round: Round | None
    nodes: tuple[Node, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    restarts_used: int = 0
    restarts_limit: int = 0
    restart_window_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """Why a round ends early."""

    cause: str
    charged: bool  # takes from the restart budget; what the node did to itself (frozen, fenced) does not
    progressed: bool  # the round had applied a new step before: the next one starts without a pause
    fatal: bool = False  # a retry would fail again: the job closes as failed


class Membership(Protocol):
    """What an agent may ask of its rendezvous."""

    def open(self, on_change: Callable[[], None]) -> None:
        """Begin; `on_change` is called after each change of `view()`."""

    def join(self, *, after: int, store_port: int) -> None:
        """Ask to be in the next round; the workers of round `after` are gone (0: there were none)."""

    def announce(self, breakage: Breakage) -> None:
        """The current round is broken: a worker of this node failed."""

    def done(self) -> None:
        """This node's workers have finished the training; the round closes when all members say so."""

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
