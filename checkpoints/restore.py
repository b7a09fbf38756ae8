"""Restore is one decision: all ranks offer, rank 0 chooses, all load and confirm, or it is struck and rank 0 chooses
again.

Nothing live is touched here: the state comes in fresh tensors, and only once every rank has verified it.

    offer/<r>       every rank: the checkpoints it sees
    try/<i>         rank 0: the commit to try and who sends it to whom, or null; the i-th attempt (then see `peers.py`)
    loaded/<i>/<r>  every rank: how it fared
    verdict/<i>     rank 0: go, again or the error that all raise
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from .choose import Choice, Offer, choose, known_rounds
from .commit import Line
from .copies import Copies, Plan, Report
from .errors import (
    CheckpointError,
    CheckpointMismatchError,
    CoordinationError,
    CorruptCheckpointError,
    FingerprintError,
    NoUsableCheckpointError,
    UnsupportedStateError,
)
from .exchange import Exchange, depart
from .load import compare, load
from .manifest import Manifest
from .offer import offer, parse_offer
from .peers import Peers, SenderFailedError, Surroundings, Trial
from .rounds import frontier
from .storage import Storage
from .tree import Nested

logger = logging.getLogger(__name__)

_NO_ROOM = "no room"
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (CheckpointMismatchError, FingerprintError, NoUsableCheckpointError, UnsupportedStateError)
} | {_NO_ROOM: CheckpointError}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified state in fresh CPU tensors; `skipped` lists the newer checkpoints passed over, with reasons."""

    step: int
    round: int
    base_step: int
    samples: int
    state: Nested
    path: str
    skipped: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `CheckpointManager.restore` was asked."""

    like: Nested | None
    fingerprint: str | None
    allow_fresh_start: bool


class Restore:
    """One collective restore as one rank sees it."""

    def __init__(
        self,
        line: Line,
        storage: Storage,
        exchange: Exchange,
        request: Request,
        around: Surroundings,
        *,
        scope: str,
        deadline: float,
    ) -> None:
        self._line, self._storage, self._exchange, self._request = line, storage, exchange, request
        self._around, self._scope, self._deadline = around, scope, deadline
        self._peers = Peers(line, storage, exchange, around, scope=scope, deadline=deadline)
        self._keys: list[str] = []
        self._offers: list[Offer] = []  # this and what follows is rank 0's
        self._copies = Copies([], around.homes, writable=around.writable)
        self._struck: dict[str, str] = {}
        self._reported: set[str] = set()

    def run(self, decided: Callable[[int], None]) -> Restored | None:
        """Agree and load. `decided` is called on rank 0 with the base step before any rank goes on.

        Raises:
            CheckpointError: the same one on every rank.
        """
        try:
            mine, sound = offer(self._storage, self._line.directory)
            problem = None
        except OSError as exc:
            mine, sound, problem = Offer(candidates=(), unsound=(), rounds=()), {}, str(exc)
        offers = self._gather("offer", {"offer": dataclasses.asdict(mine), "error": problem})
        refusal = self._open(offers)
        for attempt in itertools.count():
            trial = self._tell(f"try/{attempt}", lambda: refusal or self._choose())
            restored, verdict = self._attempt(attempt, trial, sound, decided)
            if verdict["go"]:
                break
            restored = None  # the next attempt needs its room
        self._depart()
        if verdict["error"] is not None:
            raise _KINDS.get(verdict["kind"], CheckpointError)(verdict["error"])
        return restored

    def _open(self, offers: list[Any]) -> dict[str, Any] | None:
        """Rank 0: take in the offers; the trial that ends it at once when a rank cannot read its directory."""
        for rank, entry in enumerate(offers):
            if entry["error"] is not None:
                error = f"rank {rank} cannot read the checkpoint directory: {entry['error']}"
                return _trial(error=error, kind="CheckpointError")
        self._offers = [parse_offer(entry["offer"]) for entry in offers]
        self._copies = Copies(self._offers, self._around.homes, writable=self._around.writable)
        return None

    def _attempt(
        self,
        attempt: int,
        trial: dict[str, Any],
        sound: dict[str, tuple[str, Manifest]],
        decided: Callable[[int], None],
    ) -> tuple[Restored | None, dict[str, Any]]:
        """One candidate, or none: load it, tell how it went, hear what that means."""
        proposal = _parse_trial(trial)
        serving = self._peers.serving(attempt, proposal, sound) if proposal is not None else contextlib.nullcontext()
        with serving:
            restored, report = None, Report()
            if proposal is not None:
                self._keys += self._peers.keys(attempt, proposal.plan)
                restored, report = self._try(attempt, proposal, trial["skipped"], sound)
            told = self._gather(f"loaded/{attempt}", dataclasses.asdict(report))
            reports = [Report(**each) for each in told]
            return restored, self._tell(f"verdict/{attempt}", lambda: self._judge(trial, proposal, reports, decided))

    def _choose(self) -> dict[str, Any]:
        """Rank 0: the next candidate, or the error that ends it."""
        choice = choose(self._offers, self._struck, self._around.homes)
        for name, reason in choice.skipped:
            if name not in self._reported:
                logger.warning("passed over %s: %s", self._storage.join(self._line.directory, name), reason)
        self._reported.update(name for name, _ in choice.skipped)
        if choice.chosen is not None:
            chosen = choice.chosen
            plan = self._copies.plan(chosen.commit)
            if plan is None:  # `_judge` strikes it before this can be
                raise CheckpointError(f"nobody can send step {chosen.step}, and it was chosen")
            return _trial(
                commit=chosen.commit,
                step=chosen.step,
                skipped=choice.skipped,
                senders=sorted(plan.senders.items()),
                direct=sorted(plan.direct),
                rounds=frontier(known_rounds(self._offers)),
            )
        if choice.skipped and not self._request.allow_fresh_start:
            return _trial(skipped=choice.skipped, error=self._nothing_usable(choice), kind="NoUsableCheckpointError")
        return _trial(skipped=choice.skipped)

    def _nothing_usable(self, choice: Choice) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.skipped)
        return (
            f"no checkpoint in {self._line.directory} can be restored ({reasons}). Repair or remove them, or pass "
            "allow_fresh_start (--allow-fresh-start) to begin from step 0"
        )

    def _try(
        self, attempt: int, trial: Trial, skipped: list[tuple[str, str]], sound: dict[str, tuple[str, Manifest]]
    ) -> tuple[Restored | None, Report]:
        """Load the candidate; what is wrong with it goes to rank 0."""
        direct = False
        try:
            source = self._peers.locate(attempt, trial, sound)
            direct, manifest = source.direct, source.manifest
            self._check_fingerprint(manifest)
            if self._request.like is not None:
                compare(manifest, self._request.like)
            state = load(source.files, source.path, manifest, readers=self._line.world_size)
        except CoordinationError:
            raise
        except (CheckpointError, OSError) as exc:
            failed = isinstance(exc, SenderFailedError) or (direct and isinstance(exc, CorruptCheckpointError))
            return None, Report(error=str(exc), kind=type(exc).__name__, sender_failed=failed, direct=direct)
        except (MemoryError, RuntimeError) as exc:  # what torch raises when memory is short: an older state is as large
            error = f"rank {self._line.rank} could not hold the state of step {trial.step}: {exc}"
            return None, Report(error=error, kind=_NO_ROOM)
        restored = Restored(
            step=manifest.step,
            round=manifest.round,
            base_step=manifest.base_step,
            samples=manifest.samples,
            state=state,
            path=source.path,
            skipped=tuple((self._storage.join(self._line.directory, name), reason) for name, reason in skipped),
        )
        return restored, Report(direct=direct)

    def _check_fingerprint(self, manifest: Manifest) -> None:
        live = self._request.fingerprint
        if live is not None and manifest.fingerprint and manifest.fingerprint != live:
            raise FingerprintError(
                f"the checkpoint of step {manifest.step} was made from data with the fingerprint "
                f"{manifest.fingerprint}, the data at hand has {live}: its position would count other samples. Give it "
                "its own data, or start in another directory"
            )

    def _judge(
        self, trial: dict[str, Any], proposal: Trial | None, reports: list[Report], decided: Callable[[int], None]
    ) -> dict[str, Any]:
        """Rank 0: go, try another copy, or strike the candidate. A mismatch is the caller's error: no other helps."""
        if trial["error"] is not None:
            return {"go": True, "error": trial["error"], "kind": trial["kind"]}
        failed = [(rank, report) for rank, report in enumerate(reports) if report.error is not None]
        for _, report in failed:
            if report.kind in _KINDS:
                return {"go": True, "error": report.error, "kind": report.kind}
        if failed and proposal is not None:
            commit, (rank, report) = proposal.commit, failed[0]
            self._copies.learn(commit, proposal.plan, reports)
            if self._copies.plan(commit) is None:
                self._struck[commit] = f"{report.error} (rank {rank})"
            else:
                logger.warning("another copy of step %d is tried: %s (rank %d)", proposal.step, report.error, rank)
            return {"go": False, "error": None, "kind": None}
        decided(trial["step"])
        return {"go": True, "error": None, "kind": None}

    def _gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; nothing elsewhere."""
        keys = [f"{self._scope}/{name}/{rank}" for rank in range(self._line.world_size)]
        self._keys += keys
        self._exchange.put(keys[self._line.rank], value, self._deadline)
        return self._exchange.get(keys, self._deadline) if self._line.rank == 0 else []

    def _tell(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 decides, on every rank."""
        key = f"{self._scope}/{name}"
        self._keys.append(key)
        if self._line.rank == 0:
            self._exchange.put(key, decide(), self._deadline)
        value: dict[str, Any] = self._exchange.get([key], self._deadline)[0]
        return value

    def _depart(self) -> None:
        line = self._line
        depart(
            self._exchange, self._scope, self._keys, rank=line.rank, world_size=line.world_size, deadline=self._deadline
        )


def _trial(
    *,
    commit: str | None = None,
    step: int = 0,
    skipped: Sequence[tuple[str, str]] = (),
    error: str | None = None,
    kind: str | None = None,
    **plan: list[Any],
) -> dict[str, Any]:
    """What rank 0 tells under try/<i>."""
    return {"commit": commit, "step": step, "skipped": skipped, "error": error, "kind": kind, **plan}


def _parse_trial(trial: dict[str, Any]) -> Trial | None:
    if trial["commit"] is None:
        return None
    return Trial(
        commit=trial["commit"],
        step=trial["step"],
        plan=Plan(senders=dict(trial["senders"]), direct=frozenset(trial["direct"])),
        rounds=tuple((round_, base) for round_, base in trial["rounds"]),
    )
