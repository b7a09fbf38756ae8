"""What one rank sees in its directory and in its node's memory, told to rank 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import manifest as manifests
from .choose import Candidate, Offer, Tier
from .errors import CorruptCheckpointError
from .held import Held, Opener, held_in, opened
from .manifest import Manifest, parse_step, step_name
from .memory import node_of
from .rounds import read_rounds
from .slot import Mark
from .storage import LocalStorage, Storage

IN_MEMORY = " in memory"  # ends the name of a state that no directory holds


def offer(storage: Storage, directory: str) -> tuple[Offer, dict[str, Opener]]:
    """What lies in the directory, and the sound ones by commit."""
    candidates, unsound = [], []
    sound: dict[str, Opener] = {}
    for name in storage.names(directory):
        step = parse_step(name)
        if step is None:
            continue
        path = storage.join(directory, name)
        try:
            manifest = manifests.read(storage, path)
            if manifest.step != step:
                raise CorruptCheckpointError(f"its manifest is that of step {manifest.step}")
        except CorruptCheckpointError as exc:
            unsound.append((name, str(exc)))
            continue
        sound[manifest.commit] = opened(Held(files=storage, path=path, manifest=manifest))
        candidates.append(_candidate(name, manifest.commit, "disk", manifest))
    rounds = read_rounds(storage, directory)
    return Offer(candidates=tuple(candidates), unsound=tuple(unsound), rounds=rounds), sound


def with_memory(seen: Offer, folder: Path, run_id: str) -> tuple[Offer, dict[str, Opener]]:
    """The offer together with what the node's memory holds, and that by commit."""
    held = held_in(folder, run_id)
    more = tuple(_candidate(f"{step_name(h.mark.step)}{IN_MEMORY}", h.commit, "memory", h.mark) for h in held)
    rounds = {*seen.rounds, *read_rounds(LocalStorage(), str(folder))}
    whole = dataclasses.replace(
        seen, candidates=(*seen.candidates, *more), rounds=tuple(sorted(rounds)), node=node_of(folder)
    )
    return whole, {h.commit: h.open for h in held}


def parse_offer(entry: dict[str, Any]) -> Offer:
    """The inverse of dataclasses.asdict and JSON."""
    return Offer(
        candidates=tuple(Candidate(**candidate) for candidate in entry["candidates"]),
        unsound=_pairs(entry["unsound"]),
        rounds=_pairs(entry["rounds"]),
        node=entry["node"],
        newest_round=entry["newest_round"],
    )


def _pairs(items: Iterable[Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((first, second) for first, second in items)


def _candidate(name: str, commit: str, tier: Tier, of: Manifest | Mark) -> Candidate:
    return Candidate(name=name, commit=commit, round=of.round, base_step=of.base_step, step=of.step, tier=tier)
