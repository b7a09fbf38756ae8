"""What a dead agent has left in the store is given back; what may be alive is let alone."""

from __future__ import annotations

import dataclasses

from elastic.rendezvous.ghosts import revoke_ghosts
from elastic.rendezvous.identity import Identity, own_identity
from elastic.rendezvous.records import Keys, NodeRecord
from elastic.rendezvous.round import Node
from elastic.rendezvous.store import Put
from tests.support.fake_store import FakeServer, FakeStore

DEAD_PID = 2**22 + 1  # above the highest pid there can be
KEYS = Keys("job")


def put(store: FakeStore, node_id: str, identity: Identity | None) -> None:
    lease = store.grant(5).id
    record = NodeRecord(node=Node(node_id=node_id, addr="h", slots=1), identity=identity) if identity else None
    store.write([], [Put(KEYS.node(node_id), record.to_json() if record else "{}", lease)])


def left(store: FakeStore) -> set[str]:
    return {key.removeprefix(KEYS.nodes) for key in store.read(KEYS.nodes, prefix=True).entries}


def test_only_keys_of_dead_agents_of_this_host_go() -> None:
    store, me = FakeStore(FakeServer()), own_identity()
    dead = dataclasses.replace(me, pid=DEAD_PID)
    put(store, "a", dead)
    put(store, "a-2", dead)
    put(store, "a-3", me)  # a live duplicate
    put(store, "a-4", None)  # of another version
    put(store, "a1", dataclasses.replace(dead, machine="other", boot="other"))
    put(store, "b", dead)  # another node's id: its own unit gives it back
    freed = revoke_ghosts(store, run_id="job", node_id="a", me=me)
    assert sorted(freed) == ["a", "a-2"]
    assert left(store) == {"a-3", "a-4", "a1", "b"}
