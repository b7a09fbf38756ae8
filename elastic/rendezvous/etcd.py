"""The gateway to one etcd endpoint: the only user of etcd3 and grpc, imported when a job needs them.

Of etcd3 it takes the client with its channel, and the generated messages. The client's own methods are left aside: they
drop the reason of an error and the revision of an answer, its watcher spins while etcd is away, its locks do not work.
Owns: messages to and from our values, one attempt of each call. Failover, retries and the threads of watches are not
here.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.errors import ElasticError, StoreRefusedError, UsageError
from elastic.rendezvous import etcd_messages
from elastic.rendezvous.etcd_config import Counters, EtcdConfig, endpoint_name
from elastic.rendezvous.etcd_errors import NotFoundError, translated
from elastic.rendezvous.etcd_watch import Batch
from elastic.rendezvous.store import Compare, Delete, Entry, Event, Lease, Put, Snapshot, boottime
from elastic.rendezvous.transact import Answer, NotAppliedError

try:
    etcd3, rpc = etcd_messages.load()
except ImportError as exc:
    raise UsageError(f"many nodes need etcd3 ({exc}): pip install 'elasticd[etcd]'") from exc

import grpc  # comes with etcd3, whose absence is told above

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a new client is a new connection, without another one's back-off
    ("grpc.keepalive_time_ms", 10_000),  # a watch notices a silent network; etcd allows one ping in 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),
)


class Connection:
    """One client of one endpoint, known to be alive, to have a leader and to let us in when it was made.

    Raises: StoreUnavailableError or StoreRefusedError, also from every method.
    """

    def __init__(self, config: EtcdConfig, endpoint: tuple[str, int], deadline: float, counters: Counters) -> None:
        host, port = endpoint
        self._config = config
        self._counters = counters
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._streams: set[_Stream] = set()
        self.name = endpoint_name(endpoint)
        try:
            self._client = etcd3.Etcd3Client(
                host=f"[{host}]" if ":" in host else host,
                port=port,
                ca_cert=config.ca,
                cert_cert=config.cert,
                cert_key=config.key,
                grpc_options=_OPTIONS,
            )
        except OSError as exc:
            raise StoreRefusedError(f"a certificate for etcd cannot be read: {exc}") from exc
        unary, stream = self._client.channel.unary_unary, self._client.channel.stream_stream
        self._status = self._method(unary, "Maintenance/Status", rpc.StatusResponse)
        self._authenticate = self._method(unary, "Auth/Authenticate", rpc.AuthenticateResponse)
        self._range = self._method(unary, "KV/Range", rpc.RangeResponse)
        self._txn = self._method(unary, "KV/Txn", rpc.TxnResponse)
        self._grant = self._method(unary, "Lease/LeaseGrant", rpc.LeaseGrantResponse)
        self._revoke = self._method(unary, "Lease/LeaseRevoke", rpc.LeaseRevokeResponse)
        self._keep_alive = self._method(unary, "Lease/LeaseKeepAlive", rpc.LeaseKeepAliveResponse)
        self._watch = self._method(stream, "Watch/Watch", rpc.WatchResponse)
        try:
            self.cluster_id = self._greet(deadline)
        except BaseException:
            self.close()
            raise

    def read(self, keys: Sequence[str], prefix: bool, deadline: float) -> Snapshot:
        ranges = [rpc.RangeRequest(key=key.encode(), range_end=_range_end(key, prefix)) for key in keys]
        if len(ranges) == 1:
            answer = self._call(self._range, ranges[0], deadline)
            found = answer.kvs
        else:
            request = rpc.TxnRequest(success=[rpc.RequestOp(request_range=range_) for range_ in ranges])
            answer = self._call(self._txn, request, deadline)
            return Snapshot(entries={e.key: e for e in _found_by(answer)}, revision=answer.header.revision)
        return Snapshot(entries={e.key: e for e in map(_entry, found)}, revision=answer.header.revision)

    def commit(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        peek: str | None,
        keys: Sequence[str],
        deadline: float,
    ) -> Answer:
        """One transaction, once; see `transact.Commit`."""
        request = rpc.TxnRequest()  # filled in place: a message given to a constructor is copied
        for compare in compares:
            _fill_compare(request.compare.add(), compare)
        for operation in operations:
            _fill_operation(request.success.add(), operation)
        if peek is not None:
            request.failure.add().request_range.key = peek.encode()
        for key in keys:
            request.success.add().request_range.key = request.failure.add().request_range.key = key.encode()
        try:
            answer = self._call(self._txn, request, deadline)
        except NotFoundError:
            return Answer(succeeded=False, revision=0, lease_missing=True)
        found = {e.key: e for e in _found_by(answer)}
        peeked = None if answer.succeeded or peek is None else found.pop(peek, None)
        return Answer(succeeded=answer.succeeded, revision=answer.header.revision, peeked=peeked, found=found)

    def grant(self, ttl_seconds: int, deadline: float) -> Lease:
        sent = boottime()
        answer = self._call(self._grant, rpc.LeaseGrantRequest(TTL=ttl_seconds), deadline)
        return Lease(id=answer.ID, ttl_seconds=answer.TTL, sent=sent, revision=answer.header.revision)

    def renew(self, lease_id: int, deadline: float) -> int:
        answer = self._call(self._keep_alive, rpc.LeaseKeepAliveRequest(ID=lease_id), deadline)
        return int(answer.TTL)

    def revoke(self, lease_id: int, deadline: float) -> None:
        with contextlib.suppress(NotFoundError):
            self._call(self._revoke, rpc.LeaseRevokeRequest(ID=lease_id), deadline)

    def watch(self) -> _Stream:
        """A stream that can be asked for keys.

        The server ends it when it has lost its leader: the silence of a member that is cut off would look like peace.
        """
        try:
            return _Stream(self, (*self._metadata, ("hasleader", "true")))
        except ValueError as exc:
            raise NotAppliedError(f"the connection to {self.name} was closed") from exc

    def cancel_streams(self) -> None:
        """Every watch of this connection raises StoreUnavailableError."""
        for stream in list(self._streams):
            stream.cancel()

    def close(self) -> None:
        """Ends what is in flight. Idempotent."""
        self._client.close()

    def _greet(self, deadline: float) -> int:
        status = self._call(self._status, rpc.StatusRequest(), deadline)
        if not status.leader:
            raise NotAppliedError(f"{self.name} has no leader: most of its cluster's members are away")
        if self._config.user is not None:
            request = rpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
            answer = self._call(self._authenticate, request, deadline)
            self._metadata = (("token", answer.token),)
        return int(status.header.cluster_id)

    def _method(self, kind: Any, name: str, answer: Any) -> Any:
        """A call of etcd's by its name, which counts its bytes on the way."""

        def encode(request: Any) -> bytes:
            data: bytes = request.SerializeToString()
            self._counters.add("bytes_sent", len(data))
            return data

        def decode(data: bytes) -> Any:
            self._counters.add("bytes_received", len(data))
            return answer.FromString(data)

        return kind(f"/etcdserverpb.{name}", request_serializer=encode, response_deserializer=decode)

    def _call(self, method: Any, request: Any, deadline: float) -> Any:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotAppliedError(f"no time left to ask {self.name}")
        try:
            return method(request, left, metadata=self._metadata)
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc
        except ValueError as exc:  # "Cannot invoke RPC on closed channel!"
            raise NotAppliedError(f"the connection to {self.name} was closed") from exc

    def _translated(self, exc: Any) -> ElasticError:
        return translated(exc.code().name, exc.details() or "", self.name, self._config)


class _Stream:
    """A watch on the wire; see `etcd_watch.Stream`."""

    def __init__(self, connection: Connection, metadata: tuple[tuple[str, str], ...]) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: there will be no more
        self._call = connection._watch(iter(self._requests.get, None), metadata=metadata)
        connection._streams.add(self)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for answer in self._call:
                yield _batch(answer)
        except grpc.RpcError as exc:
            raise self._connection._translated(exc) from exc

    def request(self, key: str, prefix: bool, start_revision: int) -> None:
        request = rpc.WatchRequest()
        create = request.create_request
        create.key, create.range_end = key.encode(), _range_end(key, prefix)
        create.start_revision = start_revision
        create.progress_notify = True  # moves the revision of a quiet watch past the next compaction
        self._requests.put(request)

    def release(self, watch_id: int) -> None:
        request = rpc.WatchRequest()
        request.cancel_request.watch_id = watch_id
        self._requests.put(request)

    def cancel(self) -> None:
        self._connection._streams.discard(self)
        self._requests.put(None)  # the thread that sends them ends
        self._call.cancel()


def _range_end(key: str, prefix: bool) -> bytes:
    """The first key after all that begin with `key`; empty for the key alone."""
    return bytes(etcd3.utils.increment_last_byte(key.encode())) if prefix else b""


def _text(data: bytes) -> str:
    """What another hand has written below our prefix need not be text: it is nobody's record then, and no error."""
    return data.decode(errors="replace")


def _entry(found: Any) -> Entry:
    return Entry(
        key=_text(found.key),
        value=_text(found.value),
        create_revision=found.create_revision,
        mod_revision=found.mod_revision,
        lease=found.lease,
    )


def _found_by(transaction: Any) -> Iterator[Entry]:
    """What the ranges of a transaction have found; its puts and deletions have none."""
    return (_entry(found) for response in transaction.responses for found in response.response_range.kvs)


def _fill_compare(message: Any, compare: Compare) -> None:
    message.key = compare.key.encode()
    message.result = rpc.Compare.EQUAL
    if compare.mod_revision is not None:
        message.target, message.mod_revision = rpc.Compare.MOD, compare.mod_revision
        return
    message.target, message.create_revision = rpc.Compare.CREATE, compare.create_revision or 0
    if compare.exists:
        message.result = rpc.Compare.NOT_EQUAL


def _fill_operation(message: Any, operation: Put | Delete) -> None:
    if isinstance(operation, Delete):
        message.request_delete_range.key = operation.key.encode()
        return
    put = message.request_put
    put.key, put.value, put.lease = operation.key.encode(), operation.value.encode(), operation.lease


def _batch(answer: Any) -> Batch:
    events = []
    for event in answer.events:
        entry = None if event.type else _entry(event.kv)  # 0 is PUT, 1 is DELETE
        events.append(Event(key=_text(event.kv.key), revision=event.kv.mod_revision, entry=entry))
    return Batch(
        watch_id=answer.watch_id,
        created=answer.created,
        revision=answer.header.revision,
        compacted=answer.compact_revision,
        cancelled=(answer.cancel_reason or "no reason given") if answer.canceled else "",
        events=events,
    )
