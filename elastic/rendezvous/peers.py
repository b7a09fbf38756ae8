"""The other nodes' addresses, for who wants to see them: read once per round, by nodes that do not lead."""

from __future__ import annotations

from elastic.rendezvous.records import Keys, nodes_of
from elastic.rendezvous.round import Node, Round
from elastic.rendezvous.store import Store

_SHOWN = 32  # for jobs of this size; more would be N reads of N records


class Peers:
    """What is known of the members of the newest round."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._of_round = 0
        self.nodes: tuple[Node, ...] = ()

    def read(self, current: Round | None) -> None:
        """Raises: StoreUnavailableError, StoreRefusedError."""
        if current is None or current.number == self._of_round:
            return
        self._of_round, self.nodes = current.number, ()
        if len(current.members) <= _SHOWN:
            self.nodes = tuple(nodes_of(self._store.read(self._keys.nodes, prefix=True).entries.values()))
