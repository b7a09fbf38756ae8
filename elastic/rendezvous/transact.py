"""Transactions that are applied at most once, whatever becomes of their answers.

A transaction whose answer was lost may be applied at any later time. So each writer owns one key, its nonce key: every
transaction compares the revision of that key and writes a fresh nonce into it. Invariant: of all transactions sent
since the key last changed at most one can ever be applied. Sending again is therefore safe, and the key tells which
one it was.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

import tenacity

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.store import Compare, Delete, Entry, Outcome, Put, Snapshot, check_operations

logger = logging.getLogger(__name__)

_NO_SPACE = "database space exceeded"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The store's answer to one transaction."""

    succeeded: bool
    revision: int
    peeked: Entry | None = None  # where it did not succeed: the nonce key as it is
    found: Mapping[str, Entry] = dataclasses.field(default_factory=dict)  # of the keys that were to be read after it
    lease_missing: bool = False


class NotAppliedError(StoreUnavailableError):
    """It did not arrive or was turned away: certainly nothing was applied, so it may be sent again."""


class Commit(Protocol):
    """Sends one transaction once. Raises StoreUnavailableError where no answer came: it may be applied even so."""

    def __call__(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        peek: str | None,
        keys: Sequence[str] = (),
    ) -> Answer:
        """`peek` is read in it where it fails, `keys` are in either case."""


class Transactor:
    """The `write` of a store, built on its way to send one transaction once.

    `retrying`: the policy of all writes (tenacity's are safe from many threads); it decides how long an unanswered
    one is sent again.
    """

    def __init__(self, commit: Commit, retrying: tenacity.Retrying) -> None:
        self._commit = commit
        self._retrying = retrying
        self._retrying_unsent = retrying.copy(retry=tenacity.retry_if_exception_type(NotAppliedError))
        self._lock = threading.Lock()  # one write with a nonce at a time: the next one compares what it wrote
        self._seen: dict[str, int] = {}  # nonce key -> its mod_revision as this writer last knew it
        self._has_complained = False
        self._doubtful: set[str] = set()  # nonce keys at whose revision something was sent that got no answer

    def write(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        nonce_key: str | None,
        nonce_lease: int,
    ) -> tuple[Outcome, int]:
        """See `Store.write`."""
        check_operations(operations)
        try:
            if nonce_key is None:
                return _outcome(self._retrying_unsent(self._commit, compares, operations, None))
            with self._lock:
                swap = _Swap(self, compares, operations, nonce_key, nonce_lease)
                return self._retrying(swap.attempt)
        except StoreUnavailableError as exc:
            self._complain(str(exc))
            return Outcome.UNKNOWN, 0

    def write_and_read(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], keys: Sequence[str]
    ) -> tuple[Outcome, Snapshot]:
        """See `Store.write_and_read`."""
        check_operations(operations)
        try:
            answer = self._retrying_unsent(self._commit, compares, operations, None, keys)
        except StoreUnavailableError as exc:
            self._complain(str(exc))
            return Outcome.UNKNOWN, Snapshot(entries={}, revision=0)
        outcome, revision = _outcome(answer)
        return outcome, Snapshot(entries=answer.found, revision=revision)

    def _complain(self, why: str) -> None:
        """The caller tries again and knows nothing of this; it goes away by itself, or not at all."""
        if _NO_SPACE in why and not self._has_complained:
            logger.warning(
                "etcd takes no writes, and no round can form: %s. Compact and defragment it, raise its "
                "--quota-backend-bytes, then `etcdctl alarm disarm`",
                why,
            )
        self._has_complained = _NO_SPACE in why


class _Swap:
    """One write with a nonce and all its attempts."""

    def __init__(
        self,
        owner: Transactor,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        key: str,
        lease: int,
    ) -> None:
        self._commit = owner._commit
        self._seen = owner._seen
        self._doubtful = owner._doubtful
        self._compares = compares
        self._operations = operations
        self._key = key
        self._lease = lease
        self._sent: list[str] = []

    def attempt(self) -> tuple[Outcome, int]:
        """Send it until there is an answer that says something. Raises: StoreUnavailableError to be called again."""
        while True:
            in_doubt = self._key in self._doubtful
            answer = self._send(self._compares, self._operations)
            if answer.succeeded:
                return Outcome.APPLIED, answer.revision
            if answer.lease_missing:  # no attempt can be applied from now on, but one may have been before
                return (Outcome.UNKNOWN if in_doubt and self._sent else Outcome.REFUSED), 0
            if self._moved(answer):
                if answer.peeked is not None and answer.peeked.value in self._sent:
                    return Outcome.APPLIED, answer.peeked.mod_revision
                continue  # what was sent so far compared an older revision: it was not applied and never will be
            # The caller's comparisons failed. What got no answer before may still find them true: make it void.
            if not in_doubt or self._send((), ()).succeeded:
                return Outcome.REFUSED, answer.revision

    def _send(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Answer:
        nonce = uuid.uuid4().hex
        expected = Compare(key=self._key, mod_revision=self._seen.get(self._key, 0))
        swap = Put(self._key, nonce, self._lease)
        try:
            answer = self._commit((*compares, expected), (*operations, swap), self._key)
        except NotAppliedError:
            raise
        except StoreUnavailableError:
            self._doubtful.add(self._key)
            if operations:
                self._sent.append(nonce)
            raise
        if answer.succeeded:
            self._settle(answer.revision)
        return answer

    def _moved(self, answer: Answer) -> bool:
        """Whether the nonce key is at another revision than the compared one; if so, that one is known from now on."""
        revision = answer.peeked.mod_revision if answer.peeked is not None else 0
        if revision == self._seen.get(self._key, 0):
            return False
        self._settle(revision)
        return True

    def _settle(self, revision: int) -> None:
        """The nonce key is at `revision`: whatever compared another one can never be applied any more."""
        self._seen[self._key] = revision
        self._doubtful.discard(self._key)


def _outcome(answer: Answer) -> tuple[Outcome, int]:
    return (Outcome.APPLIED if answer.succeeded else Outcome.REFUSED), answer.revision
