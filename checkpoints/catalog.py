"""What a directory of checkpoints holds: list, show, verify, prune, export. Imports no torch.

Serves the command line; every function takes a path or an fsspec URL and may be called while a job writes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import manifest as manifests
from .choose import void_reason, voiding_round
from .errors import CheckpointError, CorruptCheckpointError
from .export import write_safetensors
from .manifest import Manifest, parse_step, parse_void, parse_writing, step_name
from .publish import retain
from .rounds import highest_round as _highest_round
from .rounds import manifests_in, read_rounds
from .shards import verify_shard
from .storage import Storage, open_storage

PathLike = str | os.PathLike[str]
_SHOWN_STEPS = 20
Check = Callable[[Storage, str, Manifest], None]


def list_checkpoints(directory: PathLike) -> list[dict[str, Any]]:
    """Every checkpoint with its state, oldest first: manifests and file sizes are checked, contents are not.

    Keys: step, state (committed, partial, corrupt or void), path, reason, bytes, world_size, round, base_step, time
    (unix seconds). What a damaged manifest does not tell is None.
    """
    return _survey(directory, lambda storage, path, manifest: None)


def verify(directory: PathLike, step: int | None = None) -> list[dict[str, Any]]:
    """As `list_checkpoints`, after reading every file for its checksum; of `step` alone where it is given.

    Raises:
        CheckpointError: there is no such step.
    """
    found = _survey(directory, _verify_all, step)
    if step is not None and not found:
        raise CheckpointError(_no_step(os.fspath(directory), step))
    return found


def show(directory: PathLike, step: int) -> dict[str, Any]:
    """One committed checkpoint: what its manifest says, but for the pieces.

    Raises:
        CheckpointError: there is no such step, or its manifest is damaged.
    """
    storage, root = open_storage(directory)
    path, manifest = _find(storage, root, step)
    body: dict[str, Any] = json.loads(manifests.dump(manifest))
    for tensor in body["tensors"]:
        tensor.pop("pieces", None)
    return {"path": path, "bytes": manifest.bytes, **body}


def prune(
    directory: PathLike, keep_last: int, keep_every: int | None = None, dry_run: bool = False
) -> list[dict[str, Any]]:
    """Apply retention; returns what was removed (or would be), as in `list_checkpoints`."""
    if keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}; it must be 1 or more: the newest is always kept")
    storage, root = open_storage(directory)
    before = {entry["path"]: entry for entry in list_checkpoints(directory)}
    names = retain(storage, root, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    return [before[path] for path in (storage.join(root, name) for name in names) if path in before]


def export(directory: PathLike, out: PathLike, step: int | None = None, only: str | None = None) -> dict[str, Any]:
    """Write one checkpoint's tensors into a single safetensors file; returns step, path, bytes and number of tensors.

    Names are the keys on the way to each tensor, joined by "/"; with `only` those below that key, and without it: of
    "model" the names of the model's own state_dict. Without `step` it is the newest committed one.

    Raises:
        CheckpointError: there is none, it does not verify or has no such key; `out` is not touched then.
    """
    storage, root = open_storage(directory)
    path, manifest = _find(storage, root, _newest(directory) if step is None else step)
    _verify_all(storage, path, manifest)
    prefix = f"{only.rstrip('/')}/" if only else ""
    if only and not any(tensor.name.startswith(prefix) for tensor in manifest.tensors):
        keys = sorted({tensor.name.partition("/")[0] for tensor in manifest.tensors})
        raise CheckpointError(f"{path} has no tensors below the key {only!r}; its keys are {', '.join(keys)}")
    size, count = write_safetensors(storage, path, manifest, Path(out), prefix)
    return {"step": manifest.step, "path": os.fspath(out), "bytes": size, "tensors": count}


def highest_round(directory: PathLike) -> int:
    """The highest round that has left a trace in the directory; 0 when none has. The next start takes a higher one."""
    return _highest_round(*open_storage(directory))


def _verify_all(storage: Storage, path: str, manifest: Manifest) -> None:
    for file in range(len(manifest.files)):
        verify_shard(storage, path, manifest, file)


def _survey(directory: PathLike, check: Check, step: int | None = None) -> list[dict[str, Any]]:
    storage, root = open_storage(directory)
    sound = list(manifests_in(storage, root))
    rounds = {*read_rounds(storage, root), *((manifest.round, manifest.base_step) for manifest in sound)}
    names = [name for name in storage.names(root) if step is None or step in _steps_of(name)]
    entries = [_entry(storage, root, name, rounds, check) for name in names]
    return sorted((e for e in entries if e is not None), key=lambda e: (e["step"], e["round"] or 0, e["path"]))


def _steps_of(name: str) -> tuple[int | None, ...]:
    """The step that a directory is about, whatever its state."""
    writing = parse_writing(name)
    return parse_step(name), parse_void(name), writing[0] if writing is not None else None


def _entry(storage: Storage, root: str, name: str, rounds: set[tuple[int, int]], check: Check) -> dict[str, Any] | None:
    path = storage.join(root, name)
    writing, aside = parse_writing(name), parse_void(name)
    if writing is not None:
        return _line(step=writing[0], state="partial", path=path, reason="never committed", round_=writing[1])
    step = parse_step(name) if aside is None else aside
    if step is None:
        return None
    try:
        manifest = manifests.read(storage, path)
        check(storage, path, manifest)
    except CorruptCheckpointError as exc:
        return _line(
            step=step, state="partial" if manifests.is_missing(storage, path) else "corrupt", path=path, reason=str(exc)
        )
    by = voiding_round(manifest.round, manifest.step, rounds)
    state, reason = "committed", None
    if aside is not None or by is not None:
        state, reason = "void", void_reason(by) if by is not None else "set aside by a later commit of the step"
    return _line(step=step, state=state, path=path, reason=reason, manifest=manifest)


def _line(
    *, step: int, state: str, path: str, reason: str | None, round_: int | None = None, manifest: Manifest | None = None
) -> dict[str, Any]:
    return {
        "step": step,
        "state": state,
        "path": path,
        "reason": reason,
        "bytes": manifest.bytes if manifest is not None else None,
        "world_size": manifest.world_size if manifest is not None else None,
        "round": manifest.round if manifest is not None else round_,
        "base_step": manifest.base_step if manifest is not None else None,
        "time": manifest.unix_time if manifest is not None else None,
    }


def _newest(directory: PathLike) -> int:
    committed = [entry for entry in list_checkpoints(directory) if entry["state"] == "committed"]
    if not committed:
        raise CheckpointError(f"there is no committed checkpoint in {os.fspath(directory)}")
    return int(max(committed, key=lambda entry: (entry["round"], entry["step"]))["step"])


def _find(storage: Storage, root: str, step: int) -> tuple[str, Manifest]:
    path = storage.join(root, step_name(step))
    try:
        return path, manifests.read(storage, path)
    except CorruptCheckpointError as exc:
        is_there = path in {storage.join(root, name) for name in storage.names(root)}
        raise CheckpointError(f"{path}: {exc}" if is_there else _no_step(root, step)) from exc


def _no_step(root: str, step: int) -> str:
    steps = sorted({entry["step"] for entry in list_checkpoints(root) if entry["state"] == "committed"})
    shown = ", ".join([*(["..."] if len(steps) > _SHOWN_STEPS else []), *map(str, steps[-_SHOWN_STEPS:])])
    return f"there is no checkpoint of step {step} in {root}" + (f"; committed are the steps {shown}" if steps else "")
