"""What a group's leader does to the directory: make a written checkpoint the committed one, sweep, apply retention.

A checkpoint is committed from the instant its directory has its final name (on object stores: its manifest is there),
and every step before that leaves what was committed earlier untouched.
"""

from __future__ import annotations

import contextlib
import logging

from . import manifest as manifests
from .choose import voiding_round
from .errors import CorruptCheckpointError
from .groups import PROBE_PREFIX
from .manifest import MANIFEST, Manifest, parse_step, parse_void, parse_writing, step_name, void_name
from .retention import Kept, removable
from .rounds import read_rounds
from .shards import verify_shard
from .storage import Storage

logger = logging.getLogger(__name__)
_DOOMED_PREFIX = ".removing-"


class PublishedUnsurelyError(OSError):
    """The checkpoint has its final name, but the name may not be durable."""


def working_directory(storage: Storage, directory: str, step: int, round_: int, nonce: str) -> str:
    """Where the shards of a commit are written before it is published."""
    name = manifests.writing_name(step, round_, nonce) if storage.renames else step_name(step)
    return storage.join(directory, name)


def shard_name(storage: Storage, writer: int, writers: int, nonce: str) -> str:
    """A shard's file name; unique where it lies in the final place from the start."""
    unique = "" if storage.renames else f"-{nonce}"
    return f"shard-{writer:05d}-of-{writers:05d}{unique}.safetensors"


def publish(
    storage: Storage, directory: str, working: str, manifest: Manifest, *, received_as: str | None = None
) -> str:
    """Commit what lies in `working`; returns the checkpoint's path.

    If the step is there already it stays, and ours is dropped, only if it is whole and of this round; any other is set
    aside: it belongs to a line that this round has left, or did not verify. A copy of a peer's checkpoint, with the
    nonce `received_as`, gives way to a whole one of the same commit only.

    Raises:
        PublishedUnsurelyError: it was renamed, but the directory could not be synced.
        OSError: nothing has changed for readers.
    """
    final = storage.join(directory, step_name(manifest.step))
    present = step_name(manifest.step) in storage.names(directory)
    existing = read_whole(storage, final) if present else None
    if existing is not None and _same(existing, manifest, exact=received_as is not None):
        logger.info("step %d of round %d is committed already; this copy is dropped", manifest.step, manifest.round)
        discard(storage, working, manifest.commit)
        return final
    if not storage.renames:
        storage.replace(storage.join(final, MANIFEST), manifests.dump(manifest))
        return final
    storage.write(storage.join(working, MANIFEST), manifests.dump(manifest))
    storage.sync_directory(working)
    if present:
        label = "bad" if existing is None else f"r{existing.round}"
        aside = void_name(manifest.step, label, received_as or manifest.commit)
        _set_aside(storage, working, final, storage.join(directory, aside))
    else:
        storage.rename(working, final)
    try:
        storage.sync_directory(directory)
    except OSError as exc:
        raise PublishedUnsurelyError(exc.errno, f"{final} may not survive a power failure: {exc.strerror}") from exc
    return final


def _same(existing: Manifest, manifest: Manifest, *, exact: bool) -> bool:
    if exact:
        return existing.commit == manifest.commit
    return (existing.round, existing.incarnation) == (manifest.round, manifest.incarnation)


def _set_aside(storage: Storage, working: str, final: str, aside: str) -> None:
    """Put `working` in the place of `final`, in one atomic step where the file system has one.

    After the swap the commit stands: a failure to name what was there must not undo it.
    """
    logger.warning("%s is of a void line or damaged; it is set aside as %s", final, aside)
    if storage.swap(working, final):
        try:
            storage.rename(working, aside)
        except OSError as exc:
            logger.warning("%s keeps its name, the next restore removes it: %s", working, exc)
        return
    storage.rename(final, aside)
    try:
        storage.rename(working, final)
    except OSError:
        storage.rename(aside, final)
        raise


def read_whole(storage: Storage, path: str) -> Manifest | None:
    """The manifest at `path` if the checkpoint verifies down to its checksums."""
    try:
        manifest = manifests.read(storage, path)
        for file in range(len(manifest.files)):
            verify_shard(storage, path, manifest, file)
    except CorruptCheckpointError as exc:
        logger.warning("%s does not verify: %s", path, exc)
        return None
    return manifest


def discard(storage: Storage, working: str, nonce: str) -> None:
    """Remove what a commit that will not be published has written."""
    if storage.renames:
        storage.remove_tree(working)
        return
    for name in storage.names(working):
        if nonce in name:
            storage.remove(storage.join(working, name))


def sweep(storage: Storage, directory: str, round_: int) -> None:
    """Remove what dead commits of rounds up to `round_` left behind.

    Called by a leader at restore time, when no commit of this job is in flight.
    """
    for name in storage.names(directory):
        path = storage.join(directory, name)
        writing = parse_writing(name)
        if name.startswith(_DOOMED_PREFIX):
            storage.remove_tree(path)
        elif writing is not None and writing[1] <= round_:
            logger.info("removing %s: its writer died", path)
            with contextlib.suppress(FileNotFoundError):
                remove_at_once(storage, directory, name)
        elif name.startswith(PROBE_PREFIX) or (name.startswith(manifests.ROUNDS) and name.endswith(".tmp")):
            storage.remove(path)
        elif parse_step(name) is not None and not storage.renames:
            _sweep_objects(storage, path)


def _sweep_objects(storage: Storage, path: str) -> None:
    """Remove shards that a sound manifest, or none at all, speaks of."""
    wanted: set[str] = set()
    if not manifests.is_missing(storage, path):
        try:
            wanted = {MANIFEST, *(file.name for file in manifests.read(storage, path).files)}
        except CorruptCheckpointError:
            return
    for name in storage.names(path):
        if name not in wanted:
            storage.remove(storage.join(path, name))


def survey(storage: Storage, directory: str) -> tuple[list[Kept], dict[str, Manifest]]:
    """Every step directory as retention sees it, and the sound manifests by directory name."""
    sound: dict[str, Manifest] = {}
    names = [name for name in storage.names(directory) if parse_step(name) is not None]
    for name in names:
        try:
            sound[name] = manifests.read(storage, storage.join(directory, name))
        except CorruptCheckpointError as exc:
            logger.debug("%s: %s", name, exc)
    rounds = {*read_rounds(storage, directory), *((m.round, m.base_step) for m in sound.values())}
    kept = []
    for name in names:
        manifest = sound.get(name)
        void = manifest is not None and voiding_round(manifest.round, manifest.step, rounds) is not None
        round_ = manifest.round if manifest is not None else 0
        kept.append(Kept(name=name, round=round_, step=parse_step(name) or 0, sound=manifest is not None, void=void))
    return kept, sound


def retain(
    storage: Storage, directory: str, *, keep_last: int, keep_every: int | None, dry_run: bool = False
) -> list[str]:
    """Remove what retention lets go, and void states set aside below the newest step; returns the names."""
    kept, _ = survey(storage, directory)
    names = removable(kept, keep_last=keep_last, keep_every=keep_every)
    newest = max((s.step for s in kept if s.sound and not s.void), default=0)
    for name in storage.names(directory):
        step = parse_void(name)
        if step is not None and step < newest and "-bad-" not in name:
            names.append(name)
    for name in () if dry_run else names:
        logger.info("retention removes %s", storage.join(directory, name))
        remove_at_once(storage, directory, name)
    return names


def remove_at_once(storage: Storage, directory: str, name: str) -> None:
    """Remove a checkpoint, or what is to be one, so that nobody publishes or reads what is half removed.

    Raises: FileNotFoundError where its writer, who lives after all, has published it meanwhile.
    """
    path = storage.join(directory, name)
    if storage.renames:
        doomed = storage.join(directory, f"{_DOOMED_PREFIX}{name.lstrip('.')}")
        storage.remove_tree(doomed)
        storage.rename(path, doomed)
        path = doomed
    else:
        storage.remove(storage.join(path, MANIFEST))
    storage.remove_tree(path)
