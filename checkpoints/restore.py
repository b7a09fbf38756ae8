"""Restore is one decision: all ranks offer, rank 0 chooses, all load and confirm, or it is struck and rank 0 chooses
again.

Nothing live is touched here: the state comes in fresh tensors, and only once every rank has verified it.

    offer/<r>       every rank: the checkpoints it sees
    try/<i>         rank 0: the name to try, or null; the i-th attempt
    loaded/<i>/<r>  every rank: null, or what was wrong and of which kind
    verdict/<i>     rank 0: go, again or the error that all raise
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any

from . import manifest as manifests
from .choose import Candidate, Choice, Offer, choose
from .commit import Line
from .errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    FingerprintError,
    NoUsableCheckpointError,
    UnsupportedStateError,
)
from .exchange import Exchange, depart
from .load import compare, load
from .manifest import Manifest, parse_step
from .rounds import read_rounds
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


def offer(storage: Storage, directory: str) -> tuple[Offer, dict[str, tuple[str, Manifest]]]:
    """What this rank sees, and the sound ones by commit: (path, manifest)."""
    candidates, unsound, sound = [], [], {}
    for name in storage.names(directory):
        if parse_step(name) is None:
            continue
        path = storage.join(directory, name)
        try:
            manifest = manifests.read(storage, path)
        except CorruptCheckpointError as exc:
            unsound.append((name, str(exc)))
            continue
        sound[manifest.commit] = (path, manifest)
        candidates.append(
            Candidate(
                name=name,
                commit=manifest.commit,
                round=manifest.round,
                base_step=manifest.base_step,
                step=manifest.step,
            )
        )
    rounds = read_rounds(storage, directory)
    return Offer(candidates=tuple(candidates), unsound=tuple(unsound), rounds=rounds), sound


class Restore:
    """One collective restore as one rank sees it."""

    def __init__(
        self, line: Line, storage: Storage, exchange: Exchange, request: Request, *, scope: str, deadline: float
    ) -> None:
        self._line, self._storage, self._exchange, self._request = line, storage, exchange, request
        self._scope, self._deadline = scope, deadline
        self._keys: list[str] = []
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
        for attempt in itertools.count():
            restored, verdict = self._attempt(attempt, offers, sound, decided)
            if verdict["go"]:
                break
        self._depart()
        if verdict["error"] is not None:
            raise _KINDS.get(verdict["kind"], CheckpointError)(verdict["error"])
        return restored

    def _attempt(
        self,
        attempt: int,
        offers: list[Any],
        sound: dict[str, tuple[str, Manifest]],
        decided: Callable[[int], None],
    ) -> tuple[Restored | None, dict[str, Any]]:
        trial = self._tell(f"try/{attempt}", lambda: self._choose(offers))
        restored, fault = self._try(trial, sound)
        faults = self._gather(f"loaded/{attempt}", fault)
        return restored, self._tell(f"verdict/{attempt}", lambda: self._judge(trial, faults, decided))

    def _choose(self, offers: list[Any]) -> dict[str, Any]:
        """Rank 0: the next candidate, or the error that ends it."""
        for rank, entry in enumerate(offers):
            if entry["error"] is not None:
                error = f"rank {rank} cannot read the checkpoint directory: {entry['error']}"
                return {"commit": None, "skipped": [], "error": error, "kind": "CheckpointError"}
        choice = choose([_parse_offer(entry["offer"]) for entry in offers], self._struck)
        for name, reason in choice.skipped:
            if name not in self._reported:
                logger.warning("passed over %s: %s", self._storage.join(self._line.directory, name), reason)
        self._reported.update(name for name, _ in choice.skipped)
        trial: dict[str, Any] = {"commit": None, "step": 0, "skipped": choice.skipped, "error": None, "kind": None}
        if choice.chosen is not None:
            return {**trial, "commit": choice.chosen.commit, "step": choice.chosen.step}
        if choice.skipped and not self._request.allow_fresh_start:
            return {**trial, "error": self._nothing_usable(choice), "kind": "NoUsableCheckpointError"}
        return trial

    def _nothing_usable(self, choice: Choice) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.skipped)
        return (
            f"no checkpoint in {self._line.directory} can be restored ({reasons}). Repair or remove them, or pass "
            "allow_fresh_start (--allow-fresh-start) to begin from step 0"
        )

    def _try(
        self, trial: dict[str, Any], sound: dict[str, tuple[str, Manifest]]
    ) -> tuple[Restored | None, dict[str, Any] | None]:
        """Load the candidate; what is wrong with it goes to rank 0."""
        if trial["commit"] is None:
            return None, None
        path, manifest = sound[trial["commit"]]
        try:
            self._check_fingerprint(manifest)
            if self._request.like is not None:
                compare(manifest, self._request.like)
            state = load(self._storage, path, manifest, readers=self._line.world_size)
        except (CheckpointError, OSError) as exc:
            return None, {"error": str(exc), "kind": type(exc).__name__}
        except (MemoryError, RuntimeError) as exc:  # what torch raises when memory is short: an older state is as large
            error = f"rank {self._line.rank} could not hold the state of step {manifest.step}: {exc}"
            return None, {"error": error, "kind": _NO_ROOM}
        restored = Restored(
            step=manifest.step,
            round=manifest.round,
            base_step=manifest.base_step,
            samples=manifest.samples,
            state=state,
            path=path,
            skipped=tuple(
                (self._storage.join(self._line.directory, name), reason) for name, reason in trial["skipped"]
            ),
        )
        return restored, None

    def _check_fingerprint(self, manifest: Manifest) -> None:
        live = self._request.fingerprint
        if live is not None and manifest.fingerprint and manifest.fingerprint != live:
            raise FingerprintError(
                f"the checkpoint of step {manifest.step} was made from data with the fingerprint "
                f"{manifest.fingerprint}, the data at hand has {live}: its position would count other samples. Give it "
                "its own data, or start in another directory"
            )

    def _judge(self, trial: dict[str, Any], faults: list[Any], decided: Callable[[int], None]) -> dict[str, Any]:
        """Rank 0: go, or strike the candidate. A mismatch is the caller's error, and an older state would not help."""
        if trial["error"] is not None:
            return {"go": True, "error": trial["error"], "kind": trial["kind"]}
        found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
        for _, fault in found:
            if fault["kind"] in _KINDS:
                return {"go": True, **fault}
        if found:
            rank, fault = found[0]
            self._struck[trial["commit"]] = f"{fault['error']} (rank {rank})"
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


def _parse_offer(entry: dict[str, Any]) -> Offer:
    return Offer(
        candidates=tuple(Candidate(**candidate) for candidate in entry["candidates"]),
        unsound=tuple((name, reason) for name, reason in entry["unsound"]),
        rounds=tuple((round_, base) for round_, base in entry["rounds"]),
    )
