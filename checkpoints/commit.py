"""The rank-0 barrier of one commit: arrive -> rank 0 publishes -> depart.

Runs on the manager's background thread beside training, without collectives: keys under `commit/<n>/` on the exchange.

    rank/<r>        every rank: its shard's name, size and checksum, or its error
    verdict         rank 0, only when there are other groups: the shared part of the manifest, or the error
    published/<r>   leaders of other groups: null, or their error
    result          rank 0: committed, failed or unknown, and why

Every rank learns the result. One that cannot (the store or rank 0 is gone) reports `unknown`, which the next reading
of the directory settles; rank 0 reports `failed` for all whenever it has not published.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from .claim import Claim
from .errors import CheckpointError, CoordinationError
from .exchange import Exchange, depart
from .groups import Groups
from .image import StagedShare
from .line import Line
from .manifest import FileEntry, Hasher, Manifest
from .publish import PublishedUnsurelyError, discard, publish, shard_name, working_directory
from .storage import Storage

logger = logging.getLogger(__name__)

State = Literal["committed", "failed", "unknown"]
_SHORTEST_FENCE_SECONDS = 0.5
_LONGEST_FENCE_SECONDS = 1.0  # a lease of two seconds, renewed on time, still leaves more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One commit. `number` counts this manager's saves.

    Without a share this rank has nothing to write, for the reason in `refusal`, and only tells the others.
    """

    number: int
    step: int
    samples: int
    fingerprint: str
    share: StagedShare | None
    refusal: str = ""
    groups: Groups
    started: float
    deadline: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    state: State
    error: str | None = None


class Commit:
    """One commit as one rank sees it. `run` never raises on what can go wrong outside."""

    def __init__(
        self, job: Job, line: Line, storage: Storage, exchange: Exchange, fence: Callable[[], float], claim: Claim
    ) -> None:
        self._job, self._line, self._storage, self._exchange, self._fence = job, line, storage, exchange, fence
        self._claim = claim
        self._scope = f"commit/{job.number}"
        self._nonce = f"{line.nonce}n{job.number}"
        self._working = working_directory(storage, line.directory, job.step, line.round, self._nonce)
        # Rank 0 gives up a little earlier than those who wait for its word.
        self._patience = job.deadline - min(2.0, 0.2 * (job.deadline - job.started))

    def run(self) -> Outcome:
        """Write, arrive, publish or wait for the publication, depart."""
        arrival = self._write()
        try:
            outcome = self._lead(arrival) if self._line.rank == 0 else self._follow(arrival)
        except CoordinationError as exc:
            state: State = "failed" if arrival["error"] is not None else "unknown"
            outcome = Outcome(state=state, error=str(exc) if state == "unknown" else arrival["error"])
        if outcome.state == "failed" and self._is_leader:
            self._discard()
        self._depart()
        return outcome

    def _write(self) -> dict[str, Any]:
        """Write and sync this rank's shard; what goes wrong goes into the arrival."""
        share = self._job.share
        if share is None:
            return {"error": f"rank {self._line.rank} did not stage: {self._job.refusal}"}
        plan = share.snapshot.plan
        name = shard_name(self._storage, plan.writer, plan.writers, self._nonce)
        arrival: dict[str, Any] = {
            "error": None,
            "digest": plan.digest,
            "name": name,
            "bytes": len(share.image),
            "checksum": "",
        }
        hasher = Hasher()
        try:
            share.copying.run()
            self._claim.look(self._line)
            self._storage.make_directory(self._working)
            self._storage.write(self._storage.join(self._working, name), share.image, hasher.update)
        except (OSError, CheckpointError) as exc:
            arrival["error"] = f"rank {self._line.rank} could not write its shard: {exc}"
        if (changed := share.copying.changed()) is not None:
            arrival["error"] = f"rank {self._line.rank}: {changed} was changed while it was copied"
        arrival["checksum"] = hasher.result()
        return arrival

    def _follow(self, arrival: dict[str, Any]) -> Outcome:
        self._exchange.put(self._key(f"rank/{self._line.rank}"), arrival, self._job.deadline)
        if self._is_leader:
            (verdict,) = self._exchange.get([self._key("verdict")], self._job.deadline)
            if verdict["error"] is None:
                outcome = self._publish(self._arrivals_of_group(), verdict)
                self._exchange.put(self._key(f"published/{self._line.rank}"), outcome.error, self._job.deadline)
        (result,) = self._exchange.get([self._key("result")], self._job.deadline)
        return Outcome(state=result["state"], error=result["error"])

    def _lead(self, arrival: dict[str, Any]) -> Outcome:
        """Rank 0: wait for all, publish, announce. Whatever happens, the others are told while the store can."""
        try:
            self._exchange.put(self._key("rank/0"), arrival, self._patience)
            arrivals = self._exchange.get(
                [self._key(f"rank/{r}") for r in range(self._line.world_size)], self._patience
            )
            error = _first_error(arrivals)
        except CoordinationError as exc:
            arrivals, error = [], f"not all ranks arrived: {exc}"
        skeleton = None if self._job.share is None else self._job.share.snapshot.skeleton
        verdict = {"error": error, "state": skeleton, "unix_time": time.time()}
        outcome = Outcome(state="failed", error=error)
        try:
            if self._job.groups.other_leaders:
                self._exchange.put(self._key("verdict"), verdict, self._job.deadline)
            if error is None:
                outcome = self._publish([arrivals[r] for r in self._job.groups.members(0)], verdict)
                outcome = self._join_groups(outcome)
            self._exchange.put(self._key("result"), dataclasses.asdict(outcome), self._job.deadline)
        except CoordinationError as exc:
            logger.warning("step %d: the other ranks may not have learnt the result: %s", self._job.step, exc)
        return outcome

    def _join_groups(self, outcome: Outcome) -> Outcome:
        """Committed means committed in every group: a restore takes nothing that some rank cannot read."""
        others = self._job.groups.other_leaders
        try:
            errors = self._exchange.get([self._key(f"published/{r}") for r in others], self._patience)
        except CoordinationError as exc:
            return Outcome(state="unknown", error=f"not all writing groups have published: {exc}")
        failed = [f"the group of rank {rank}: {error}" for rank, error in zip(others, errors, strict=True) if error]
        return Outcome(state="failed", error="; ".join(failed)) if failed and outcome.state == "committed" else outcome

    def _publish(self, arrivals: list[dict[str, Any]], verdict: dict[str, Any]) -> Outcome:
        """Commit this group's copy, if this node may still do so and if there is what the ranks say they wrote."""
        try:
            for arrival in arrivals:
                size = self._storage.size(self._storage.join(self._working, arrival["name"]))
                if size != arrival["bytes"]:
                    raise CheckpointError(f"{arrival['name']} has {size} bytes here instead of {arrival['bytes']}")
            self._claim.renew(self._line)
            self._await_fence()
            publish(self._storage, self._line.directory, self._working, self._manifest(arrivals, verdict))
        except PublishedUnsurelyError as exc:
            return Outcome(state="unknown", error=str(exc))
        except (OSError, CheckpointError) as exc:
            return Outcome(state="failed", error=f"rank {self._line.rank} could not publish: {exc}")
        if self._fence() <= 0:
            return Outcome(state="unknown", error="the lease may have ended during the publication")
        return Outcome(state="committed")

    def _await_fence(self) -> None:
        """Publish only while the lease holds for longer than that takes; a renewal on its way is waited for."""
        needed = min(max(0.1 * (time.monotonic() - self._job.started), _SHORTEST_FENCE_SECONDS), _LONGEST_FENCE_SECONDS)
        while (left := self._fence()) <= needed:
            if time.monotonic() > self._patience or left <= 0:
                raise CheckpointError(f"the lease may end in {left:.1f} s; publishing needs {needed:.1f} s")
            time.sleep(0.05)

    def _manifest(self, arrivals: list[dict[str, Any]], verdict: dict[str, Any]) -> Manifest:
        line, job = self._line, self._job
        if job.share is None:
            raise CheckpointError(job.refusal)
        return Manifest(
            run_id=line.run_id,
            incarnation=line.incarnation,
            round=line.round,
            base_step=line.base_step,
            step=job.step,
            world_size=line.world_size,
            samples=job.samples,
            fingerprint=job.fingerprint,
            commit=self._nonce,
            unix_time=verdict["unix_time"],
            state=verdict["state"],
            tensors=job.share.snapshot.plan.tensors,
            pieces=job.share.snapshot.plan.pieces,
            files=tuple(FileEntry(name=a["name"], bytes=a["bytes"], checksum=a["checksum"]) for a in arrivals),
        )

    def _arrivals_of_group(self) -> list[dict[str, Any]]:
        members = self._job.groups.members(self._line.rank)
        return self._exchange.get([self._key(f"rank/{r}") for r in members], self._job.deadline)

    def _discard(self) -> None:
        try:
            discard(self._storage, self._working, self._nonce)
        except OSError as exc:
            logger.warning("%s could not be removed: %s", self._working, exc)

    def _depart(self) -> None:
        line = self._line
        keys = [self._key(f"rank/{r}") for r in range(line.world_size)]
        keys += [self._key(f"published/{r}") for r in self._job.groups.other_leaders]
        keys += [self._key("verdict"), self._key("result")]
        try:
            depart(
                self._exchange,
                self._scope,
                keys,
                rank=line.rank,
                world_size=line.world_size,
                deadline=max(self._job.deadline, time.monotonic() + 0.1),
            )
        except CoordinationError as exc:
            logger.info("step %d: departed without the others: %s", self._job.step, exc)

    @property
    def _is_leader(self) -> bool:
        return self._job.groups.leaders[self._line.rank] == self._line.rank

    def _key(self, name: str) -> str:
        return f"{self._scope}/{name}"


def _first_error(arrivals: list[dict[str, Any]]) -> str | None:
    for rank, arrival in enumerate(arrivals):
        if arrival["error"] is not None:
            return str(arrival["error"])
        if arrival["digest"] != arrivals[0]["digest"]:
            return f"the tensors of rank {rank}'s state differ from rank 0's in name, dtype or shape"
    return None
