"""What a participant shows to the agent's side: all of one moment, frozen, so that any thread may read it."""

from __future__ import annotations

import dataclasses

from elastic.errors import ElasticError
from elastic.rendezvous.records import News
from elastic.rendezvous.round import Node, Phase, Round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the agent may see, all of one moment."""

    node: Node
    round: Round | None = None
    nodes: tuple[Node, ...] = ()
    news: News | None = None
    is_joined: bool = False
    is_leader: bool = False
    is_expelled: bool = False
    incarnation: str = ""
    short_since: float | None = None  # fewer than MIN nodes since then
    answered_at: float = 0.0  # when the store last answered this node
    error: ElasticError | None = None
    has_left: bool = False

    def is_spare(self, max_nodes: int) -> bool:
        """Whether the running round has MAX members without this node."""
        current = self.round
        if current is None or not self.is_joined or current.phase not in (Phase.RUNNING, Phase.DRAINING):
            return False
        return current.seat_of(self.node.node_id, self.node.join) is None and len(current.members) >= max_nodes
