"""How to reach an etcd cluster, and what was done with it: settings and counters, without a client library."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import threading
from collections.abc import Mapping

from elastic import values
from elastic.errors import UsageError

_COUNTERS = ("operations", "retries", "errors", "bytes_sent", "bytes_received", "unknown_writes", "gaps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Where etcd is and how to get in. `timeout_seconds` is for a whole call; one attempt gets a third of it.

    Raises: UsageError for settings that contradict each other.
    """

    endpoints: tuple[tuple[str, int], ...]
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    timeout_seconds: float = 6.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UsageError("no endpoint of etcd is given; --rdzv-endpoint HOST:2379[,HOST:2379...]")
        if (self.cert is None) != (self.key is None):
            raise UsageError("--etcd-cert and --etcd-key need each other")
        if self.cert is not None and self.ca is None:
            raise UsageError("--etcd-cert needs --etcd-ca, the authority that the server is checked against")
        if self.user is not None and self.password is None:
            raise UsageError(f"--etcd-user {self.user} needs its password in the variable ELASTICD_ETCD_PASSWORD")
        if self.timeout_seconds <= 0:
            raise UsageError(f"a timeout of {self.timeout_seconds} s for etcd must be more than 0")


def parse_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """`h1:2379,[::1]` as pairs of host and port. Raises: UsageError."""
    try:
        parts = values.endpoints(text).split(",")
    except argparse.ArgumentTypeError as exc:
        raise UsageError(f"the endpoints of etcd: {exc}") from exc
    pairs = (part.rpartition(":") for part in parts)
    return tuple((host.strip("[]"), int(port)) for host, _, port in pairs)


def endpoint_name(endpoint: tuple[str, int]) -> str:
    """HOST:PORT as --rdzv-endpoint and a URL have it: an address of IPv6 in brackets."""
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Counters:
    """What the gateway has done since its start; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter(dict.fromkeys(_COUNTERS, 0))

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
