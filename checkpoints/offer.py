"""What one rank sees in its directory, told to rank 0."""

from __future__ import annotations

from typing import Any

from . import manifest as manifests
from .choose import Candidate, Offer
from .errors import CorruptCheckpointError
from .manifest import Manifest, parse_step
from .rounds import read_rounds
from .storage import Storage


def offer(storage: Storage, directory: str) -> tuple[Offer, dict[str, tuple[str, Manifest]]]:
    """What this rank sees, and the sound ones by commit: (path, manifest)."""
    candidates, unsound, sound = [], [], {}
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
        sound[manifest.commit] = (path, manifest)
        candidates.append(
            Candidate(
                name=name,
                commit=manifest.commit,
                round=manifest.round,
                base_step=manifest.base_step,
                step=step,
            )
        )
    rounds = read_rounds(storage, directory)
    return Offer(candidates=tuple(candidates), unsound=tuple(unsound), rounds=rounds), sound


def parse_offer(entry: dict[str, Any]) -> Offer:
    """The inverse of dataclasses.asdict and JSON."""
    return Offer(
        candidates=tuple(Candidate(**candidate) for candidate in entry["candidates"]),
        unsound=tuple((name, reason) for name, reason in entry["unsound"]),
        rounds=tuple((round_, base) for round_, base in entry["rounds"]),
    )
