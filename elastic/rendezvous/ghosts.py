"""What agents of this host have left in the store that are certainly dead: their leases are ended before their time."""

from __future__ import annotations

from elastic.rendezvous.identity import Claim, Identity, judge
from elastic.rendezvous.records import Keys, NodeRecord
from elastic.rendezvous.store import Store


def revoke_ghosts(store: Store, *, run_id: str, node_id: str, me: Identity) -> list[str]:
    """End the lease of each key of `node_id` (or `node_id-2` ...) whose writer is dead; returns the ids set free.

    Only for who knows that the workers are dead too. Whose writer may live, here or elsewhere, is let alone; and so is
    a record of another version that cannot be read. Raises: StoreUnavailableError, StoreRefusedError.
    """
    keys = Keys(run_id)
    freed = []
    for key, entry in store.read(keys.node(node_id), prefix=True).entries.items():
        try:
            identity = NodeRecord.from_json(entry.value).identity
        except ValueError:
            continue
        if judge(identity, me) is Claim.GHOST:
            store.revoke(entry.lease)
            freed.append(key.removeprefix(keys.nodes))
    return freed
