"""Gateway to the round's store: small JSON values between the ranks, every wait with a deadline of its own.

One store client is one lock, and a frozen server obeys no timeout. So each operation runs on a thread of this
exchange's own, on its own clone of the store, and the caller waits for the answer only until its deadline; a client
that did not answer by then is abandoned together with its thread, and the next operation starts with a fresh one.
"""

from __future__ import annotations

import abc
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

from .errors import CoordinationError

Json: TypeAlias = Any
T = TypeVar("T")
_GRACE_SECONDS = 0.5  # for a healthy store to report its own timeout before we give up on it
_DEPART_SECONDS = 5.0


class Store(Protocol):
    """What is used of a torch.distributed.Store: TCPStore, PrefixStore, FileStore, HashStore."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, value: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def delete_key(self, key: str, /) -> bool: ...


class Exchange(abc.ABC):
    """A board that all ranks write to and read from. Deadlines are time.monotonic() values."""

    @abc.abstractmethod
    def put(self, key: str, value: Json, deadline: float) -> None:
        """Write a value; when this returns it is there for all to read.

        Raises:
            CoordinationError: this and the other methods, when the store is gone or the deadline passes.
        """

    @abc.abstractmethod
    def get(self, keys: Sequence[str], deadline: float) -> list[Json]:
        """Wait until all keys are there, and return their values."""

    @abc.abstractmethod
    def count(self, key: str, deadline: float) -> int:
        """Add one to a counter and return it."""

    @abc.abstractmethod
    def drop(self, keys: Sequence[str], deadline: float) -> None:
        """Delete keys; one that is not there is no error."""

    @abc.abstractmethod
    def close(self) -> None: ...


class LocalExchange(Exchange):
    """The board of a world of one."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def put(self, key: str, value: Json, deadline: float) -> None:
        self._values[key] = json.dumps(value)

    def get(self, keys: Sequence[str], deadline: float) -> list[Json]:
        return [json.loads(self._values[key]) for key in keys]

    def count(self, key: str, deadline: float) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + 1)
        return int(self._values[key])

    def drop(self, keys: Sequence[str], deadline: float) -> None:
        for key in keys:
            self._values.pop(key, None)

    def close(self) -> None: ...


class StoreExchange(Exchange):
    """The board in a torch.distributed store, under a prefix. Used by one thread at a time."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._client: _Client | None = None

    def put(self, key: str, value: Json, deadline: float) -> None:
        full, text = self._prefix + key, json.dumps(value)

        def operation(store: Store) -> None:
            store.set(full, text)
            store.check([full])  # set alone "succeeds" on a dead server; an answer proves that it was heard

        self._call(operation, deadline, f"write {key}")

    def get(self, keys: Sequence[str], deadline: float) -> list[Json]:
        full = [self._prefix + key for key in keys]

        def operation(store: Store) -> list[bytes] | list[str]:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait(full, timedelta(seconds=left))
            except RuntimeError:  # DistStoreError when the time is over, DistNetworkError when the server is gone
                if time.monotonic() < deadline - 0.05:
                    raise
                return [key for key in keys if not store.check([self._prefix + key])]
            return [store.get(key) for key in full]

        values = self._call(operation, deadline, f"read {', '.join(keys)}")
        if values and isinstance(values[0], str):
            raise CoordinationError(f"no answer in time: {', '.join(map(str, values))} did not come")
        return [json.loads(value) for value in values]

    def count(self, key: str, deadline: float) -> int:
        return self._call(lambda store: store.add(self._prefix + key, 1), deadline, f"count {key}")

    def drop(self, keys: Sequence[str], deadline: float) -> None:
        def operation(store: Store) -> None:
            for key in keys:
                store.delete_key(self._prefix + key)

        self._call(operation, deadline, "delete keys")

    def close(self) -> None:
        if self._client is not None:
            self._client.stop()
            self._client = None

    def _call(self, operation: Callable[[Store], T], deadline: float, what: str) -> T:
        if self._client is None:
            self._client = _Client(self._store)
        future = self._client.submit(operation)
        try:
            return future.result(timeout=max(deadline - time.monotonic(), 0.0) + _GRACE_SECONDS)
        except CoordinationError:
            raise
        except Exception as exc:
            self._client.abandon()
            self._client = None
            if not future.done():
                raise CoordinationError(f"the store did not answer in time ({what}): frozen or cut off") from exc
            raise CoordinationError(f"the store failed ({what}): {exc}") from exc


class _Client:
    """One clone of the store and the thread that alone talks to it."""

    def __init__(self, store: Store) -> None:
        self._requests: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), name="checkpoint-store", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[Store], T]) -> Future[T]:
        future: Future[T] = Future()
        self._requests.put((operation, future))
        return future

    def abandon(self) -> None:
        """Let the thread end when, if ever, its operation returns."""
        self._requests.put(None)

    def stop(self) -> None:
        self.abandon()
        self._thread.join(1.0)

    def _serve(self, store: Store) -> None:
        clone: Store | None = None
        while (request := self._requests.get()) is not None:
            operation, future = request
            try:
                clone = clone if clone is not None else store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
                future.set_result(operation(clone))
            except Exception as exc:  # noqa: BLE001 - it is the caller's
                future.set_exception(exc)


def depart(exchange: Exchange, scope: str, keys: Sequence[str], *, rank: int, world_size: int, deadline: float) -> None:
    """Leave a conversation under `scope`. Every rank calls it when it has read all it needs; rank 0 goes last.

    Rank 0 may hold the store's server: it waits, five seconds at most, until all others have left, and deletes `keys`.
    """
    count, gone = f"{scope}/departed", f"{scope}/gone"
    if rank != 0:
        if exchange.count(count, deadline) == world_size - 1:
            exchange.put(gone, True, deadline)
        return
    if world_size > 1:
        exchange.get([gone], min(deadline, time.monotonic() + _DEPART_SECONDS))
    exchange.drop([*keys, count, gone], deadline)


def open_exchange(store: Store | None, rank: int, world_size: int, deadline: float) -> Exchange:
    """The board of this manager. Managers on one store are told apart by the order in which each rank makes them."""
    if store is None or world_size == 1:
        return LocalExchange()
    counter = StoreExchange(store, "checkpoints/")
    try:
        number = counter.count(f"managers/{rank}", deadline)
    finally:
        counter.close()
    return StoreExchange(store, f"checkpoints/{number}/")
