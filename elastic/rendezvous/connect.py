"""Puts a membership on etcd together. Nothing else here knows both the protocol and the real store."""

from __future__ import annotations

from collections.abc import Callable

from elastic.rendezvous.etcd_config import EtcdConfig
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.lease import LeaseKeeper
from elastic.rendezvous.member import Member
from elastic.rendezvous.participant import Settings
from elastic.rendezvous.store import Lease, Store


def make_member(*, etcd: EtcdConfig, run_id: str, settings: Settings, join_timeout_seconds: float) -> Member:
    """A membership of job `run_id`, to be opened. Raises: UsageError where etcd3 cannot be imported."""
    return member_on(open_store(etcd), run_id=run_id, settings=settings, join_timeout_seconds=join_timeout_seconds)


def member_on(
    store: Store,
    *,
    run_id: str,
    settings: Settings,
    join_timeout_seconds: float,
    on_renewed: Callable[[float], None] = lambda _: None,
) -> Member:
    """The same on a store that is there; the member closes it. `on_renewed`: see `lease.LeaseKeeper`."""

    def make_keeper(lease: Lease, on_lost: Callable[[], None]) -> LeaseKeeper:
        keeper = LeaseKeeper(store, lease, on_lost=on_lost, on_renewed=on_renewed)
        keeper.start()
        return keeper

    return Member(
        store=store,
        run_id=run_id,
        settings=settings,
        join_timeout_seconds=join_timeout_seconds,
        make_keeper=make_keeper,
    )
