"""The contract between the rendezvous protocol and the key-value store under it: values, outcomes, one Protocol.

The semantics are those of etcd v3: revisions that grow with every change, leases, transactions that compare before they
write, watches that start at a revision. `etcd.Etcd` is the real store; the tests have one in memory, and both pass the
same contract suite. Nothing here imports a client library.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

MAX_OPERATIONS = 120  # per transaction: etcd's default limit is 128, and a nonce may be added


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key as it is in the store."""

    key: str
    value: str
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one read saw; `revision` is the store's, also where nothing was found: watch after it to miss nothing."""

    entries: Mapping[str, Entry]
    revision: int

    def get(self, key: str) -> Entry | None:
        return self.entries.get(key)


class Outcome(enum.Enum):
    """What became of a write."""

    APPLIED = "applied"
    REFUSED = "refused"  # a comparison failed or a lease of it is gone: nothing was written, nor will be
    UNKNOWN = "unknown"  # no answer, and it may still be applied: read everything again and decide anew


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """A condition on one key; exactly one of the three is given. A revision of 0 means: the key is not there."""

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None
    exists: bool | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.mod_revision, self.create_revision, self.exists) if v is not None]
        if len(given) != 1:
            raise ValueError(f"a comparison of {self.key!r} needs exactly one condition, not {len(given)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """Write a key; with a lease the key goes when the lease ends."""

    key: str
    value: str
    lease: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; nothing happens where it is not there."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease and the ttl that was granted, which may be longer than what was asked for."""

    id: int
    ttl_seconds: int
    sent: float  # CLOCK_BOOTTIME when it was asked for: it ends no earlier than a ttl after this
    revision: int = 0  # the store's when it was granted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of one key at `revision`; `entry` is None where the key was deleted."""

    key: str
    revision: int
    entry: Entry | None


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """No callback begins after this returned, unless it is called from within one. Idempotent."""


class Store(Protocol):
    """What the rendezvous needs of a store. Every call ends within the store's timeout; safe from many threads."""

    def read(self, key: str, *more: str, prefix: bool = False) -> Snapshot:
        """The newest state of these keys at one moment, or of all that begin with one of them.

        It sees every write answered before. Several keys cost hardly more than one.

        Raises: StoreUnavailableError, after retries over all endpoints; StoreRefusedError.
        """

    def write(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        nonce_key: str | None = None,
        nonce_lease: int = 0,
    ) -> tuple[Outcome, int]:
        """All operations or none, if all comparisons hold. Returns the outcome and the store's revision at it.

        `nonce_key` is a key of this writer alone (under `nonce_lease`) that every such write swaps: it makes it safe to
        send again what got no answer, so that UNKNOWN is left for a store that stays away. Without it any missing
        answer is UNKNOWN. The revision is 0 for UNKNOWN and where a lease was gone.
        Raises: StoreRefusedError; ValueError for more than MAX_OPERATIONS or two operations on one key.
        """

    def write_and_read(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], keys: Sequence[str]
    ) -> tuple[Outcome, Snapshot]:
        """As `write` without a nonce, and in the same transaction the state of these keys after it, applied or refused.

        The snapshot is empty, at revision 0, for UNKNOWN and where a lease was gone.
        Raises: as `write`.
        """

    def grant(self, ttl_seconds: int) -> Lease:
        """A new lease. Raises: StoreUnavailableError, StoreRefusedError."""

    def renew(self, lease_id: int, *, timeout_seconds: float | None = None) -> int:
        """The lease's ttl from now on; 0: it is gone. One attempt: a failure moves on to the next endpoint.

        Raises: StoreUnavailableError, StoreRefusedError.
        """

    def revoke(self, lease_id: int) -> None:
        """End the lease and delete its keys; a lease that is gone is fine. Raises: StoreUnavailableError."""

    def watch(
        self,
        keys: Sequence[str],
        *,
        prefix: bool = False,
        after_revision: int,
        on_events: Callable[[list[Event]], None],
        on_gap: Callable[[], None],
    ) -> Watch:
        """Changes of all these keys after `after_revision`, none twice; it re-creates itself after any failure.

        Those of one of `keys` (with `prefix`: of all that begin with it) are told in order, and what one write changed
        in one call; between two of them there is no order. Keys that are watched together cost as much as one.

        Callbacks come one at a time, from a thread of the store's. `on_gap`: history was compacted or lost, events are
        missing: read again. Events that follow a gap may be older than that read: compare revisions.
        """

    def counters(self) -> Mapping[str, int]:
        """Since the start: operations, retries, errors, bytes_sent, bytes_received, unknown_writes, gaps."""

    def close(self) -> None:
        """End all watches and connections; calls in flight fail. Idempotent."""


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME, which goes on while the machine sleeps: the store's clock does not stop either."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def check_operations(operations: Sequence[Put | Delete]) -> None:
    """Raises: ValueError for a transaction that etcd would not take."""
    keys = [operation.key for operation in operations]
    if len(keys) > MAX_OPERATIONS:
        raise ValueError(f"{len(keys)} operations in one transaction; at most {MAX_OPERATIONS} are allowed")
    if len(set(keys)) != len(keys):
        raise ValueError(f"two operations on one key in one transaction: {sorted(keys)}")
