"""Each endpoint of etcd: reached, encrypted, let in, how fast; its version and clock; what the keys say of peers."""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from elastic.checks.clock import check_difference
from elastic.checks.finding import Finding, error, ok, warning
from elastic.errors import ElasticError
from elastic.rendezvous.etcd_config import Counters, EtcdConfig, endpoint_name
from elastic.rendezvous.mismatch import differences, other_program
from elastic.rendezvous.records import Keys, NodeRecord
from elastic.rendezvous.store import Delete, Put

ANSWER_SECONDS = 3.0
_LEAST_ETCD = (3, 4)
_READS = 5
_SLOW_SECONDS = 0.1
_DATE_GRAIN_SECONDS = 1.0  # of the Date header of HTTP
_PROBE_TTL_SECONDS = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What one endpoint has answered; `failure` says what went wrong first."""

    name: str
    failure: str = ""
    remedy: str = ""
    version: str = ""
    clock_ahead_seconds: float | None = None  # of ours, against its own
    cluster_id: int = 0
    read_seconds: float = 0.0  # median of a few reads of the job's keys
    records: tuple[str, ...] = ()  # of the job's nodes


def ask_endpoints(config: EtcdConfig, run_id: str) -> list[Endpoint]:
    """Each endpoint alone, all at the same time. Raises: UsageError where etcd3 cannot be imported."""
    import elastic.rendezvous.etcd  # noqa: F401 - once, before the threads want it

    with ThreadPoolExecutor(len(config.endpoints)) as pool:
        return list(pool.map(lambda endpoint: _ask(config, endpoint, run_id), config.endpoints))


def check_endpoints(found: Sequence[Endpoint], lease_ttl_seconds: int) -> Iterator[Finding]:
    """One that is away is a warning as long as another one answers: the agents go on to the next."""
    working = [endpoint for endpoint in found if not endpoint.failure]
    for endpoint in found:
        if endpoint.failure:
            make = warning if working else error
            yield make("etcd", f"{endpoint.name}: {endpoint.failure}", endpoint.remedy)
        else:
            yield _speed(endpoint, lease_ttl_seconds)
            yield from _version(endpoint)
            if endpoint.clock_ahead_seconds is not None:
                yield from check_difference(f"etcd at {endpoint.name}", endpoint.clock_ahead_seconds, 1.0)
    clusters = {endpoint.cluster_id: endpoint.name for endpoint in working}
    if len(clusters) > 1:
        names = " and ".join(clusters.values())
        yield error("etcd", f"{names} belong to different clusters", "give endpoints of one cluster")
    if len(found) == 1:
        yield ok("etcd members", "one endpoint: where it fails, no new round can form until it is back")


def check_write(config: EtcdConfig, endpoint: tuple[str, int], run_id: str) -> Iterator[Finding]:
    """Whether the job may write its keys: one of our own is put under a lease, and removed again."""
    from elastic.rendezvous.etcd import Connection

    key, deadline = f"{Keys(run_id).prefix}doctor/{socket.gethostname()}", time.monotonic() + ANSWER_SECONDS
    try:
        with contextlib.closing(Connection(config, endpoint, deadline, Counters())) as connection:
            lease = connection.grant(_PROBE_TTL_SECONDS, deadline)
            connection.commit([], [Put(key, "", lease=lease.id)], None, (), deadline)
            connection.commit([], [Delete(key)], None, (), deadline)
            connection.revoke(lease.id, deadline)
    except ElasticError as exc:
        remedy = f"etcdctl role grant-permission ROLE --prefix readwrite {Keys(run_id).prefix}"
        yield error("etcd write", f"the keys of job {run_id} cannot be written: {exc}", remedy)
    else:
        yield ok("etcd write", f"keys below {Keys(run_id).prefix} can be read and written")


def check_peers(
    records: Sequence[str], *, node_id: str, version: str, protocol: int, settings: str, program: str
) -> Iterator[Finding]:
    """The nodes that are in the job now, by what they say of themselves."""
    peers = []
    for text in records:
        try:
            record = NodeRecord.from_json(text)
        except ValueError as exc:
            yield warning(
                "peers", f"a record that cannot be read: {exc}", "a newer elasticd: use one version everywhere"
            )
            continue
        if record.node.node_id != node_id:
            peers.append(record)
    for peer in peers:
        yield from _peer(peer, version, protocol, settings, program)
    agree = sum(peer.protocol == protocol for peer in peers)
    yield ok("peers", f"{agree} of {len(peers)} nodes of the job speak protocol {protocol}" if peers else "none yet")


def _peer(peer: NodeRecord, version: str, protocol: int, settings: str, program: str) -> Iterator[Finding]:
    who = f"node {peer.node.node_id} ({peer.node.addr})"
    if peer.protocol != protocol:
        message = f"{who} has elasticd {peer.version or '?'}, protocol {peer.protocol}; here {version}, {protocol}"
        yield error("peers", message, "the same elasticd on every node of a job")
    elif peer.version and peer.version != version:
        message = f"{who} has elasticd {peer.version}, here {version}; the protocol is the same"
        yield warning("peers", message, "upgrade the rest, one node at a time")
    if settings and peer.node.settings and peer.node.settings != settings:
        message = f"{who} runs with other settings; here is {differences(settings, peer.node.settings)}"
        yield error("peers", message, "the same flags or job file on every node")
    if other := other_program(program, peer.node.program):
        yield warning("peers", f"{who} runs {other}", "the same script and arguments on every node, unless it is meant")


def _ask(config: EtcdConfig, endpoint: tuple[str, int], run_id: str) -> Endpoint:
    from elastic.rendezvous.etcd import Connection

    host, name = endpoint[0], endpoint_name(endpoint)
    try:
        with socket.create_connection(endpoint, timeout=ANSWER_SECONDS):
            pass
    except socket.gaierror as exc:
        return Endpoint(
            name=name, failure=f"{host} has no address: {exc.strerror}", remedy="check --rdzv-endpoint and DNS"
        )
    except OSError as exc:
        why = exc.strerror or f"no answer within {ANSWER_SECONDS:g} s"
        return Endpoint(name=name, failure=why, remedy="is etcd running there, is the port open in every firewall?")
    deadline = time.monotonic() + ANSWER_SECONDS
    keys = Keys(run_id)
    try:
        with contextlib.closing(Connection(config, endpoint, deadline, Counters())) as connection:
            records, seconds = [], []
            for _ in range(_READS):
                began = time.monotonic()
                entries = connection.read((keys.nodes,), True, deadline).entries
                seconds.append(time.monotonic() - began)
                records = [entry.value for entry in entries.values()]
            cluster_id = connection.cluster_id
    except ElasticError as exc:
        return Endpoint(name=name, failure=str(exc), remedy="see --etcd-ca, --etcd-user and the README on etcd")
    version, ahead = _greeting(config, endpoint)
    return Endpoint(
        name=name,
        version=version,
        clock_ahead_seconds=ahead,
        cluster_id=cluster_id,
        read_seconds=sorted(seconds)[len(seconds) // 2],
        records=tuple(records),
    )


def _greeting(config: EtcdConfig, endpoint: tuple[str, int]) -> tuple[str, float | None]:
    """etcd's version, and how far our clock is ahead of its own: the answer's Date, which has whole seconds.

    etcd's own protocol tells no time. Nothing is known where it does not answer HTTP.
    """
    request: http.client.HTTPConnection = http.client.HTTPConnection(*endpoint, timeout=ANSWER_SECONDS)
    try:
        if config.ca is not None:
            context = ssl.create_default_context(cafile=config.ca)
            if config.cert is not None and config.key is not None:
                context.load_cert_chain(config.cert, config.key)
            request = http.client.HTTPSConnection(*endpoint, timeout=ANSWER_SECONDS, context=context)
        began = time.time()
        request.request("GET", "/version")
        answer = request.getresponse()
        version, date = str(json.load(answer)["etcdserver"]), answer.headers["Date"]
        middle = (began + time.time()) / 2
        told = email.utils.parsedate_to_datetime(date).timestamp() + _DATE_GRAIN_SECONDS / 2
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "", None
    finally:
        request.close()
    return version, middle - told


def _speed(endpoint: Endpoint, lease_ttl_seconds: int) -> Finding:
    milliseconds = endpoint.read_seconds * 1000
    message = f"{endpoint.name} answers in {milliseconds:.1f} ms"
    if endpoint.read_seconds > lease_ttl_seconds / 6:
        return error("etcd", f"{message}; a renewal has {lease_ttl_seconds / 6:.2g} s", "a nearer etcd, or a longer "
                     "--lease-ttl")  # fmt: skip
    if endpoint.read_seconds > _SLOW_SECONDS:
        return warning("etcd", message, "a nearer or less busy etcd: each step of a rendezvous waits for it")
    return ok("etcd", message)


def _version(endpoint: Endpoint) -> Iterator[Finding]:
    if not endpoint.version:
        yield warning("etcd version", f"{endpoint.name} does not tell it, nor the time", "is GET /version let through?")
    elif tuple(int(part) for part in endpoint.version.split(".")[:2]) < _LEAST_ETCD:
        least = ".".join(map(str, _LEAST_ETCD))
        yield error("etcd version", f"{endpoint.name} is etcd {endpoint.version}", f"etcd {least} or newer")
    else:
        yield ok("etcd version", f"{endpoint.name} is etcd {endpoint.version}")
