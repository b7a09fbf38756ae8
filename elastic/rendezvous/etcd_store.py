"""The store on an etcd cluster: every call with a deadline, retries, the next endpoint, watches that stay.

What goes over the wire is in `etcd.py`, which is imported by `open_store` only: etcd3 is not for every process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tenacity

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.etcd_config import Counters, EtcdConfig
from elastic.rendezvous.etcd_endpoints import Endpoints, Link
from elastic.rendezvous.etcd_watch import EtcdWatch, Watches
from elastic.rendezvous.store import Compare, Delete, Event, Lease, Outcome, Put, Snapshot
from elastic.rendezvous.transact import Answer, NotAppliedError, Transactor

if TYPE_CHECKING:
    from elastic.rendezvous.etcd import Connection

T = TypeVar("T")

_LEAST_CONNECT_SECONDS = 1.0


def open_store(config: EtcdConfig, *, first: int | None = None) -> EtcdStore:
    """A store on the cluster of `config`, which is asked at the first call. `first`: the endpoint to begin with.

    Raises: UsageError where etcd3 cannot be imported.
    """
    from elastic.rendezvous.etcd import Connection

    counters = Counters()
    connect = functools.partial(_connect, Connection, config, counters)
    return EtcdStore(Endpoints(config.endpoints, connect, first=first), config.timeout_seconds, counters)


class EtcdStore:
    """A `Store`. One attempt of a call takes at most a third of `timeout_seconds`, the call ends within it."""

    def __init__(
        self, endpoints: Endpoints, timeout_seconds: float, counters: Counters, *, shared: Watches | None = None
    ) -> None:
        """`shared`: the watches of the store that owns the endpoints, where it is not this one."""
        self._endpoints = endpoints
        self._owns_endpoints = shared is None
        self._timeout_seconds = timeout_seconds
        self._attempt_seconds = timeout_seconds / 3
        self._counters = counters
        self._all_watches = shared or Watches(self._borrow_for_watch, self._attempt_seconds)
        self._own_watches: list[EtcdWatch] = []
        self._closed = threading.Event()
        self._retrying = self._policy()
        self._transactor = Transactor(self._commit, self._retrying)

    def read(self, key: str, *more: str, prefix: bool = False) -> Snapshot:
        return self._retried(lambda connection, deadline: connection.read((key, *more), prefix, deadline))

    def write(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        nonce_key: str | None = None,
        nonce_lease: int = 0,
    ) -> tuple[Outcome, int]:
        outcome, revision = self._transactor.write(compares, operations, nonce_key=nonce_key, nonce_lease=nonce_lease)
        if outcome is Outcome.UNKNOWN:
            self._counters.add("unknown_writes")
        return outcome, revision

    def write_and_read(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], keys: Sequence[str]
    ) -> tuple[Outcome, Snapshot]:
        outcome, found = self._transactor.write_and_read(compares, operations, keys)
        if outcome is Outcome.UNKNOWN:
            self._counters.add("unknown_writes")
        return outcome, found

    def grant(self, ttl_seconds: int) -> Lease:
        return self._retried(lambda connection, deadline: connection.grant(ttl_seconds, deadline))

    def renew(self, lease_id: int, *, timeout_seconds: float | None = None) -> int:
        seconds = self._attempt_seconds if timeout_seconds is None else timeout_seconds
        connect_seconds = max(seconds, _LEAST_CONNECT_SECONDS)  # a handshake may take longer than an answer
        return self._once(lambda connection, deadline: connection.renew(lease_id, deadline), seconds, connect_seconds)

    def revoke(self, lease_id: int) -> None:
        self._retried(lambda connection, deadline: connection.revoke(lease_id, deadline))

    def watch(
        self,
        keys: Sequence[str],
        *,
        prefix: bool = False,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> EtcdWatch:
        if self._closed.is_set():
            raise NotAppliedError("the store was closed")

        def gap() -> None:
            self._counters.add("gaps")
            on_gap()

        watch = self._all_watches.add(
            keys, prefix=prefix, after_revision=after_revision, on_events=on_events, on_gap=gap
        )
        self._own_watches = [*(other for other in self._own_watches if not other.closed), watch]
        return watch

    def counters(self) -> Mapping[str, int]:
        return self._counters.snapshot()

    def sharing(self) -> EtcdStore:
        """Another store on the same connection and counters: many nodes in one process need not have one each.

        Closing it ends its own watches; the connection is closed with this one.
        """
        return EtcdStore(self._endpoints, self._timeout_seconds, self._counters, shared=self._all_watches)

    def close(self) -> None:
        self._closed.set()
        if self._owns_endpoints:
            self._endpoints.close()
            self._all_watches.close()
        for watch in self._own_watches:
            watch.close()

    def _commit(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        peek: str | None,
        keys: Sequence[str] = (),
    ) -> Answer:
        return self._once(lambda connection, deadline: connection.commit(compares, operations, peek, keys, deadline))

    def _retried(self, act: Callable[[Connection, float], T]) -> T:
        return cast("T", self._retrying(self._once, act))

    def _once(
        self,
        act: Callable[[Connection, float], T],
        seconds: float | None = None,
        connect_seconds: float | None = None,
    ) -> T:
        """One attempt on the current endpoint; connecting, where needed, leaves some of the time for the call."""
        if self._closed.is_set():
            raise NotAppliedError("the store was closed")
        start = time.monotonic()
        seconds = self._attempt_seconds if seconds is None else seconds
        self._counters.add("operations")
        try:
            with self._endpoints.use(start + (connect_seconds or seconds * 0.7)) as link:
                begin = time.monotonic() if connect_seconds else start
                return act(cast("Connection", link), begin + seconds)
        except StoreUnavailableError:
            self._counters.add("errors")
            raise

    @contextlib.contextmanager
    def _borrow_for_watch(self) -> Iterator[Connection]:
        with self._endpoints.use(time.monotonic() + self._attempt_seconds) as link:
            yield cast("Connection", link)

    def _policy(self) -> tenacity.Retrying:
        """Attempts begin within two thirds of the timeout, so that the last one ends within it."""
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailableError),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=self._attempt_seconds / 2),
            stop=tenacity.stop_any(
                tenacity.stop_before_delay(self._timeout_seconds * 2 / 3), tenacity.stop_when_event_set(self._closed)
            ),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=lambda _: self._counters.add("retries"),
            reraise=True,
        )


def _connect(
    make: Callable[[EtcdConfig, tuple[str, int], float, Counters], Any],
    config: EtcdConfig,
    counters: Counters,
    endpoint: tuple[str, int],
    deadline: float,
) -> Link:
    return cast("Link", make(config, endpoint, deadline, counters))
