"""One connection to one of several endpoints at a time, and the next endpoint after any failure.

Endpoints are taken in turn from a random first one, so that many nodes spread over the members of a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from elastic.errors import StoreRefusedError, StoreUnavailableError
from elastic.rendezvous.etcd_config import endpoint_name
from elastic.rendezvous.transact import NotAppliedError

logger = logging.getLogger(__name__)


class Link(Protocol):
    """What is needed of a connection here."""

    name: str
    cluster_id: int

    def cancel_streams(self) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(eq=False, slots=True)
class _Held:
    """A connection, how many calls use it, and whether new ones may."""

    link: Link
    users: int = 0
    retired: bool = False


class Endpoints:
    """Hands out the current connection; makes it when there is none. Safe from many threads.

    A connection that failed is retired: calls in flight on it may still finish, its watches are told to move.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        connect: Callable[[tuple[str, int], float], Link],  # (endpoint, deadline)
        *,
        first: int | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._connect = connect
        self._position = random.randrange(len(self._endpoints)) if first is None else first
        self._current: _Held | None = None
        self._cluster_id: int | None = None
        self._lock = threading.Lock()  # of the fields; held for moments
        self._connecting = threading.Lock()  # one thread connects, the others wait for what it gets
        self._closed = False

    @contextlib.contextmanager
    def use(self, connect_deadline: float) -> Iterator[Link]:
        """The connection for one call or one watch; StoreUnavailableError from within retires it."""
        held = self._borrow(connect_deadline)
        try:
            yield held.link
        except StoreUnavailableError:
            self._retire(held)
            raise
        finally:
            with self._lock:
                held.users -= 1
                unused = held.retired and held.users == 0
            if unused:
                held.link.close()

    def close(self) -> None:
        """Nothing is handed out any more; what is in flight ends. Idempotent."""
        with self._lock:
            self._closed = True
            held, self._current = self._current, None
        if held is not None:
            held.link.cancel_streams()
            held.link.close()

    def _borrow(self, deadline: float) -> _Held:
        while True:
            with self._lock:
                if self._closed:
                    raise NotAppliedError("the store was closed")
                if self._current is not None:
                    self._current.users += 1
                    return self._current
            if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise NotAppliedError(f"no connection to {' or '.join(map(endpoint_name, self._endpoints))}")
            try:
                if self._current is None and not self._closed:
                    self._install(self._connect_any(deadline))
            finally:
                self._connecting.release()

    def _install(self, link: Link) -> None:
        with self._lock:
            if not self._closed:
                self._current = _Held(link)
                return
        link.close()

    def _retire(self, held: _Held) -> None:
        with self._lock:
            held.retired = True
            if self._current is held:
                self._current = None
                self._position = (self._position + 1) % len(self._endpoints)
        held.link.cancel_streams()

    def _connect_any(self, deadline: float) -> Link:
        """The first endpoint that answers, each given its share of the time.

        A refusal by one of them, such as a wrong certificate, is raised only if no other one lets us in, and only
        at the start: later it is a trouble of the servers', such as a name that is gone while they are started again,
        which a running job waits out as it does any other.
        """
        failures: list[str] = []
        refusal: StoreRefusedError | None = None
        count = len(self._endpoints)
        for tried in range(count):
            position = (self._position + tried) % count
            now = time.monotonic()
            try:
                link = self._connect(self._endpoints[position], now + (deadline - now) / (count - tried))
                self._check_cluster(link)
            except StoreRefusedError as exc:
                refusal = exc
                failures.append(str(exc))
            except StoreUnavailableError as exc:
                failures.append(str(exc))
            else:
                self._position = position
                logger.debug("connected to etcd at %s", link.name)
                return link
        self._position = (self._position + 1) % count
        if refusal is not None and self._cluster_id is None:
            raise refusal
        raise NotAppliedError(f"no endpoint of etcd answers: {'; '.join(failures)}")

    def _check_cluster(self, link: Link) -> None:
        """A client talks happily to somebody else's server on the same port; ours has the id that was seen first."""
        if self._cluster_id is None:
            self._cluster_id = link.cluster_id
        if link.cluster_id != self._cluster_id:
            link.close()
            raise NotAppliedError(
                f"{link.name} belongs to another cluster ({link.cluster_id:x}) than the one used so far "
                f"({self._cluster_id:x}); check --rdzv-endpoint; if this etcd was restored from a snapshot, start the "
                "agents again"
            )
