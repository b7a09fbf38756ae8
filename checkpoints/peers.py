"""One rank's part in sending a candidate about: serve it, take it in for its home, or find where to read it.

serve/<i>/<r>      a sender: its address and token, or why it cannot send; while attempt i lasts
received/<i>/<r>   the first rank of a home that lacked the candidate: how it fared; read by the others of the home
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import manifest as manifests
from .choose import Tier
from .claim import Claim
from .copies import Plan
from .errors import CorruptCheckpointError
from .exchange import Exchange
from .held import Held, Opener, opened
from .line import Line
from .manifest import Manifest, step_name
from .memory import MemoryTier
from .receive import Inbox, read_manifest, receive, receive_aside
from .rounds import record_rounds
from .storage import LocalStorage, Readable, Storage
from .transfer import Address, Peer, Sender

logger = logging.getLogger(__name__)
_SHARE_OF_TIME = 0.75  # of what a restore has left, for one transfer: another sender may have to be asked


class SenderFailedError(CorruptCheckpointError):
    """The candidate did not come whole from this sender; another may do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a rank stands among the others.

    Attributes:
        homes: of each rank on disk; ranks of one home see the same directory.
        writable: it is known who shares a directory, and that it can be written to.
        address: at which the others reach this machine.
        claim: what is known of the directory from earlier rounds.
        memory: the node's, where it has one.
    """

    homes: tuple[int, ...]
    writable: bool
    address: Callable[[], str]
    claim: Claim
    memory: MemoryTier | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What rank 0 proposes: the commit and who sends it to whom; `rounds` is all that is known of them.

    `homes` gives each rank's in the tier of the commit.
    """

    commit: str
    step: int
    tier: Tier
    homes: tuple[int, ...]
    plan: Plan
    rounds: tuple[tuple[int, int], ...]

    def as_json(self, skipped: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """What rank 0 tells under try/<i>."""
        plan = {"senders": sorted(self.plan.senders.items()), "direct": sorted(self.plan.direct)}
        return {**nothing_to_try(skipped), **dataclasses.asdict(self), "plan": plan}


def nothing_to_try(skipped: Sequence[tuple[str, str]], error: str | None = None, kind: str = "") -> dict[str, Any]:
    """What rank 0 tells under try/<i> when there is no candidate; with an error, that ends it."""
    return {"commit": None, "step": 0, "skipped": skipped, "error": error, "kind": kind}


def parse_trial(told: dict[str, Any]) -> Trial | None:
    """The inverse of `as_json`; None when there is no candidate."""
    if told["commit"] is None:
        return None
    plan = told["plan"]
    return Trial(
        commit=told["commit"],
        step=told["step"],
        tier=told["tier"],
        homes=tuple(told["homes"]),
        plan=Plan(senders=dict(plan["senders"]), direct=frozenset(plan["direct"])),
        rounds=tuple((round_, base) for round_, base in told["rounds"]),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where this rank reads the candidate. `direct`: over the network, into memory alone."""

    files: Readable
    path: str
    manifest: Manifest
    direct: bool


class Peers:
    """This rank in the transfers of one restore."""

    def __init__(
        self, line: Line, storage: Storage, exchange: Exchange, around: Surroundings, *, scope: str, deadline: float
    ) -> None:
        self._line, self._storage, self._exchange, self._around = line, storage, exchange, around
        self._scope, self._deadline = scope, deadline

    def keys(self, attempt: int, plan: Plan) -> list[str]:
        """All that the ranks put on the exchange in an attempt."""
        return [
            *(self._key("serve", attempt, sender) for sender in set(plan.senders.values())),
            *(self._key("received", attempt, home) for home in plan.senders),
        ]

    @contextlib.contextmanager
    def serving(self, attempt: int, trial: Trial, sound: Mapping[str, Opener]) -> Iterator[None]:
        """Send the candidate to whoever needs it while the block lasts, if this rank is to."""
        if self._line.rank not in trial.plan.senders.values():
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                held = sound[trial.commit]()
                host = self._around.address()
                sender = Sender(held.files, held.path, held.manifest, host=host, deadline=self._deadline)
                stack.callback(sender.close)
                where: dict[str, Any] = dataclasses.asdict(sender.address)
            except (OSError, CorruptCheckpointError) as exc:
                where = {"error": f"rank {self._line.rank} cannot send it: {exc}"}
            self._exchange.put(self._key("serve", attempt, self._line.rank), where, self._deadline)
            yield

    def locate(self, attempt: int, trial: Trial, sound: dict[str, Opener]) -> Source:
        """Where to read the candidate, once this rank's home has it if it lacked it.

        Raises:
            SenderFailedError: it did not come.
            CorruptCheckpointError: it came, and is not there.
        """
        home = trial.homes[self._line.rank]
        sender = trial.plan.senders.get(home)
        if sender is None:
            return _source(sound[trial.commit]())
        if home not in trial.plan.direct and self._take_in(attempt, trial, sender):
            files: Storage = self._storage
            path = self._storage.join(self._line.directory, step_name(trial.step))
            if trial.tier == "memory":
                files, path = LocalStorage(), self._inbox(attempt)
            held = Held(files=files, path=path, manifest=manifests.read(files, path))
            sound[trial.commit] = opened(held)
            return _source(held)
        with self._blaming(sender):
            peer = self._reach(attempt, sender)
            manifest = read_manifest(peer, trial.commit)
        return Source(files=peer, path=f"rank {sender}", manifest=manifest, direct=True)

    def _take_in(self, attempt: int, trial: Trial, sender: int) -> bool:
        """Whether the home has a copy now. If not it cannot keep one, and each rank is to read from the sender."""
        home = trial.homes[self._line.rank]
        key = self._key("received", attempt, home)
        if self._line.rank == home:
            kept, error = False, None
            try:
                self._receive(attempt, trial, sender)
                kept = True
            except SenderFailedError as exc:
                error = str(exc)
            except (OSError, MemoryError) as exc:
                logger.warning("rank %d cannot keep a copy of what it is sent: %s", self._line.rank, exc)
            self._exchange.put(key, {"kept": kept, "error": error}, self._deadline)
        (outcome,) = self._exchange.get([key], self._deadline)
        if outcome["error"] is not None:
            raise SenderFailedError(outcome["error"])
        return bool(outcome["kept"])

    def _receive(self, attempt: int, trial: Trial, sender: int) -> None:
        line = self._line
        if trial.tier == "memory":
            with self._blaming(sender):
                receive_aside(self._reach(attempt, sender), trial.commit, LocalStorage(), self._inbox(attempt))
            return
        record_rounds(self._storage, line.directory, trial.rounds)
        nonce = f"{line.nonce}{self._scope.replace('/', '')}t{attempt}"
        inbox = Inbox(directory=line.directory, round=line.round, nonce=nonce)
        with self._blaming(sender):
            receive(self._reach(attempt, sender), trial.commit, self._storage, inbox)

    def _inbox(self, attempt: int) -> str:
        """Where the node's first rank puts what comes for its memory; it goes when the restore is over."""
        if self._around.memory is None:
            raise CorruptCheckpointError(f"rank {self._line.rank} has no memory to keep it in")
        return self._around.memory.inbox(f"{self._line.nonce}{self._scope.replace('/', '')}t{attempt}")

    def _reach(self, attempt: int, sender: int) -> Peer:
        (where,) = self._exchange.get([self._key("serve", attempt, sender)], self._deadline)
        if "error" in where:
            raise CorruptCheckpointError(where["error"])
        now = time.monotonic()
        return Peer(address=Address(**where), deadline=now + _SHARE_OF_TIME * (self._deadline - now))

    @contextlib.contextmanager
    def _blaming(self, sender: int) -> Iterator[None]:
        try:
            yield
        except CorruptCheckpointError as exc:
            raise SenderFailedError(f"it did not come from rank {sender}: {exc}") from exc

    def _key(self, name: str, attempt: int, rank: int) -> str:
        return f"{self._scope}/{name}/{attempt}/{rank}"


def _source(held: Held) -> Source:
    return Source(files=held.files, path=held.path, manifest=held.manifest, direct=False)
