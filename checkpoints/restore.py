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
from collections.abc import Callable
from typing import Any

from .choose import Choice, Offer, Tier, choose, find_homes, known_rounds, voiding_round
from .copies import Copies, Report
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
from .held import Opener
from .line import Line
from .load import compare, load
from .manifest import Manifest
from .offer import IN_MEMORY, offer, parse_offer, with_memory
from .peers import Peers, SenderFailedError, Surroundings, Trial, nothing_to_try, parse_trial
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
    """A verified state in fresh CPU tensors; `skipped` lists the newer ones passed over, with reasons.

    `tier`: what it was restored from, in `files`. From memory: it is not on disk, and goes when the node does.
    """

    step: int
    round: int
    base_step: int
    samples: int
    state: Nested
    path: str
    skipped: tuple[tuple[str, str], ...]
    tier: Tier = "disk"
    files: tuple[str, ...] = ()
    disk_step: int = -1  # the newest of this line that lies in this rank's directory, -1: none


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
        self._homes = find_homes([], around.homes, writable=around.writable)
        self._copies = Copies([], self._homes)
        self._struck: dict[str, str] = {}
        self._unreadable = ""  # why a rank cannot see what is on disk
        self._reported: set[str] = set()

    def run(self, decided: Callable[[int], None]) -> Restored | None:
        """Agree and load. `decided` is called on rank 0 with the base step before any rank goes on.

        Raises:
            CheckpointError: the same one on every rank.
        """
        mine, sound, problem = self._look()
        offers = self._gather("offer", {"offer": dataclasses.asdict(mine), "error": problem})
        refusal = self._open(offers)
        for attempt in itertools.count():
            told = self._tell(f"try/{attempt}", lambda: refusal or self._choose())
            restored, verdict = self._attempt(attempt, told, sound, decided)
            if verdict["go"]:
                break
            restored = None  # the next attempt needs its room
        self._depart()
        if self._around.memory is not None:
            self._around.memory.clear_inbox()
        if verdict["error"] is not None:
            raise _KINDS.get(verdict["kind"], CheckpointError)(verdict["error"])
        return restored and dataclasses.replace(restored, disk_step=_newest_on_disk(mine, restored))

    def _look(self) -> tuple[Offer, dict[str, Opener], str | None]:
        """What this rank sees, and what keeps it from looking. Memory that cannot be read is as if it held nothing."""
        problem: str | None = None
        try:
            self._around.claim.look(self._line)
            mine, sound = offer(self._storage, self._line.directory)
        except (OSError, CheckpointError) as exc:
            mine, sound, problem = Offer(candidates=(), unsound=(), rounds=()), {}, str(exc)
        if self._around.memory is not None and self._around.memory.problem is None:
            try:
                mine, held = with_memory(mine, self._around.memory.folder, self._line.run_id)
                mine = dataclasses.replace(mine, newest_round=self._around.claim.newest_round)
                sound |= held
            except OSError as exc:
                logger.warning("rank %d cannot read what memory holds: %s", self._line.rank, exc)
        return mine, sound, problem

    def _open(self, offers: list[Any]) -> dict[str, Any] | None:
        """Rank 0: take in the offers.

        A rank that cannot read its directory ends it, unless memory holds a state and has been there in the round
        before this one: what a round without it has committed since is not to be lost.
        """
        self._offers = [parse_offer(entry["offer"]) for entry in offers]
        unreadable = [(rank, entry["error"]) for rank, entry in enumerate(offers) if entry["error"] is not None]
        if unreadable:
            self._unreadable = "rank {} cannot read the checkpoint directory: {}".format(*unreadable[0])
            if not any(candidate.tier == "memory" for offered in self._offers for candidate in offered.candidates):
                return nothing_to_try((), self._unreadable, "CheckpointError")
            newest, before = max(offered.newest_round for offered in self._offers), self._line.round - 1
            if newest < before:
                problem = f"{self._unreadable}; memory is of round {newest}, and round {before} may have committed more"
                return nothing_to_try((), problem, "CheckpointError")
        self._homes = find_homes(self._offers, self._around.homes, writable=self._around.writable)
        self._copies = Copies(self._offers, self._homes)
        return None

    def _attempt(
        self,
        attempt: int,
        told: dict[str, Any],
        sound: dict[str, Opener],
        decided: Callable[[int], None],
    ) -> tuple[Restored | None, dict[str, Any]]:
        """One candidate, or none: load it, tell how it went, hear what that means."""
        proposal = parse_trial(told)
        serving = self._peers.serving(attempt, proposal, sound) if proposal is not None else contextlib.nullcontext()
        with serving:
            restored, report = None, Report()
            if proposal is not None:
                self._keys += self._peers.keys(attempt, proposal.plan)
                restored, report = self._try(attempt, proposal, told["skipped"], sound)
            reports = [Report(**each) for each in self._gather(f"loaded/{attempt}", dataclasses.asdict(report))]
            return restored, self._tell(f"verdict/{attempt}", lambda: self._judge(told, proposal, reports, decided))

    def _choose(self) -> dict[str, Any]:
        """Rank 0: the next candidate, or the error that ends it."""
        choice = choose(self._offers, self._struck, self._homes)
        for name, reason in choice.skipped:
            if name not in self._reported:
                logger.warning("passed over %s: %s", self._place(name), reason)
        self._reported.update(name for name, _ in choice.skipped)
        if choice.chosen is not None:
            chosen = choice.chosen
            plan = self._copies.plan(chosen.commit)
            if plan is None:  # `_judge` strikes it before this can be
                raise CheckpointError(f"nobody can send step {chosen.step}, and it was chosen")
            trial = Trial(
                commit=chosen.commit,
                step=chosen.step,
                tier=chosen.tier,
                homes=self._homes.of(chosen.tier),
                plan=plan,
                rounds=tuple(frontier(known_rounds(self._offers))),
            )
            return trial.as_json(choice.skipped)
        if self._unreadable:  # what is there is not known: no reason to begin anew
            return nothing_to_try(choice.skipped, self._unreadable, "CheckpointError")
        if choice.refuse and not self._request.allow_fresh_start:
            return nothing_to_try(choice.skipped, self._nothing_usable(choice), "NoUsableCheckpointError")
        return nothing_to_try(choice.skipped)

    def _place(self, name: str) -> str:
        """Where a state lies, for people: what memory holds has no path on disk."""
        return name if name.endswith(IN_MEMORY) else self._storage.join(self._line.directory, name)

    def _nothing_usable(self, choice: Choice) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.skipped)
        return (
            f"no checkpoint in {self._line.directory} can be restored ({reasons}). Repair or remove them, or pass "
            "allow_fresh_start (--allow-fresh-start) to begin from step 0"
        )

    def _try(
        self, attempt: int, trial: Trial, skipped: list[tuple[str, str]], sound: dict[str, Opener]
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
            skipped=tuple((self._place(name), reason) for name, reason in skipped),
            tier=trial.tier,
            files=tuple(file.name for file in manifest.files),
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
        self, told: dict[str, Any], proposal: Trial | None, reports: list[Report], decided: Callable[[int], None]
    ) -> dict[str, Any]:
        """Rank 0: go, try another copy, or strike the candidate. A mismatch is the caller's error: no other helps."""
        if told["error"] is not None:
            return {"go": True, "error": told["error"], "kind": told["kind"]}
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
        decided(told["step"])
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


def _newest_on_disk(seen: Offer, restored: Restored) -> int:
    """What a restart of everything would go on from, as far as this rank sees."""
    return max(
        (
            candidate.step
            for candidate in seen.candidates
            if candidate.tier == "disk" and candidate.step <= restored.step
            if voiding_round(candidate.round, candidate.step, seen.rounds) is None
        ),
        default=-1,
    )
