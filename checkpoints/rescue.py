"""What only a node's memory holds when nobody trains any more: committed to disk, for the next start to go on from.

Called by the owner of the memory once its workers are gone. The state is an ordinary checkpoint from then on, of the
round that kept it; whatever keeps a commit of the newest round from a directory keeps this one from it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import time
from pathlib import Path

from .choose import choose, find_homes
from .claim import Claim, later_round, whose
from .errors import CheckpointError, CorruptCheckpointError, ForeignDirectoryError, StaleRoundError
from .held import Whole, held_in
from .line import Line
from .manifest import FileEntry, Hasher, Manifest
from .offer import offer, with_memory
from .publish import discard, publish, remove_at_once, shard_name, working_directory
from .rounds import Record, read_record
from .slot import Window
from .storage import Storage, open_storage

logger = logging.getLogger(__name__)
_NONCE = "rescued"  # the same on every node: who makes the directory of that name does it
_AGAIN_SECONDS = 0.2  # doubling: there may be a thousand nodes that look
_LONGEST_AGAIN_SECONDS = 2.0
_SILENT_SECONDS = 10.0  # a node that has written nothing for so long


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The newest step of the run that the directory has. `is_new`: until now memory alone held it."""

    step: int
    path: str
    is_new: bool = False


def rescue(
    folder: str | os.PathLike[str] | None,
    directory: str | os.PathLike[str],
    run_id: str,
    *,
    is_first: bool = True,
    is_alone: bool = False,
    patience_seconds: float = 60.0,
    is_told: bool = False,
) -> Saved | None:
    """Commit the newest whole state of the run in `folder`, unless the directory has one as new; None: it has none.

    Of several nodes that see one directory one does it, and the others wait for as long as it gets on; `is_alone` says
    that there are none. On an object store, where they cannot see that, only the one that `is_first` does. A state that
    is damaged gives way to the one before it. `is_told`: the log has it already that this is going on.

    Raises:
        StaleRoundError: the job has gone on elsewhere, and what memory holds is of no use any more.
        CheckpointError: the directory is not the one that the job was in, or another node has not finished in time.
        OSError: it cannot be written there.
    """
    storage, root = open_storage(directory)
    deadline = time.monotonic() + patience_seconds
    struck: dict[str, str] = {}
    others = _Others()
    while True:
        whole, saved = _look(storage, root, Path(folder) if folder is not None else None, run_id, struck)
        if whole is None and folder is not None:
            _check_superseded(storage, root, Path(folder), run_id)
        if whole is None or folder is None or not (storage.renames or is_first):
            return saved
        step = whole.mark.step
        commit = _Commit(storage, root, Path(folder), whole, others.dead)
        if commit.begin():
            if not is_told:
                logger.info("step %d of job %s is in memory alone: saving it to %s", step, run_id, root)
            try:
                return Saved(step=step, path=commit.run(), is_new=True)
            except CorruptCheckpointError as exc:
                logger.warning("step %d in memory is passed over: %s", step, exc)
                struck[whole.commit] = str(exc)
        elif is_alone:  # whoever has begun it is dead, and its room is needed
            commit.clear()
        elif others.are_silent(commit.written()):
            others.dead += 1
        elif time.monotonic() >= deadline:
            raise CheckpointError(f"another node has not finished saving step {step} to {commit.working}")
        else:
            others.wait()


class _Others:
    """Whether a node that has begun gets on. One that does not has died over it: somebody else does it beside that."""

    def __init__(self) -> None:
        self.dead = 0
        self._seen: list[tuple[str, int | None]] | None = None
        self._since = 0.0
        self._pause_seconds = _AGAIN_SECONDS

    def are_silent(self, written: list[tuple[str, int | None]]) -> bool:
        now = time.monotonic()
        if written != self._seen:
            self._seen, self._since = written, now
        return now - self._since > _SILENT_SECONDS

    def wait(self) -> None:
        time.sleep(self._pause_seconds * random.uniform(0.5, 1.0))
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_AGAIN_SECONDS)


class _Commit:
    """Of what memory holds whole, without ranks: one process has all the shares."""

    def __init__(self, storage: Storage, root: str, folder: Path, whole: Whole, number: int) -> None:
        """`number`: of tries by others that have come to nothing."""
        self._storage, self._root, self._whole = storage, root, whole
        self._claim = Claim(storage, root, folder)
        self.working = working_directory(storage, root, whole.mark.step, whole.mark.round, f"{_NONCE}{number}")

    def begin(self) -> bool:
        """Whether it is ours to do, and nobody else's. Raises: CheckpointError, OSError."""
        self.check()
        self._storage.make_directory(self._root)
        return self._storage.make_new_directory(self.working)

    def clear(self) -> None:
        """Of what a dead process has begun; one that lives after all fails, or has published it. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError):
            remove_at_once(self._storage, self._root, Path(self.working).name)

    def written(self) -> list[tuple[str, int | None]]:
        """What whoever has begun has written so far."""
        names = self._storage.names(self.working)
        return [(self.working, None), *((n, self._storage.size(self._storage.join(self.working, n))) for n in names)]

    def run(self) -> str:
        """Returns the checkpoint's path. Raises: CheckpointError, OSError; nothing is left of it then."""
        try:
            manifest = self._write()
            self._stake()
            return publish(self._storage, self._root, self.working, manifest)
        except BaseException:
            with contextlib.suppress(OSError):
                discard(self._storage, self.working, self._whole.commit)
            raise

    def check(self) -> Record | None:
        """The directory's record, which says nothing against it. Raises: as `rescue`."""
        line, record = self._line, read_record(self._storage, self._root)
        if line.incarnation and record is not None and record.owner is not None:
            number, owner = record.owner
            if owner.rpartition("/")[0] != line.run_id:
                raise ForeignDirectoryError(
                    f"{self._root} is in round {number} of {owner!r}, this is of {whose(line)!r}"
                )
        try:
            return self._claim.check(line)
        except StaleRoundError as exc:
            if later_round(line, record):
                raise
            raise CheckpointError(str(exc)) from exc  # the directory may be put back

    def _stake(self) -> None:
        """Look once more; a round that could not be put on record when it began is, now."""
        record, line = self.check(), self._line
        if record is None or all(round_ < line.round for round_, _ in record.rounds):
            self._claim.stake(line)

    @property
    def _line(self) -> Line:
        """Whose commit it is: of the last round that this memory took part in, which may have restored it."""
        mark = self._whole.mark
        round_, base_step = max((mark.round, mark.base_step), self._claim.newest)
        return Line(
            run_id=mark.run_id,
            incarnation=mark.incarnation,
            round=round_,
            base_step=base_step,
            rank=0,
            world_size=mark.world_size,
            directory=self._root,
            nonce=mark.nonce,
        )

    def _write(self) -> Manifest:
        """Every share as a shard, straight from where it lies. Raises: CorruptCheckpointError, OSError."""
        whole, files = self._whole, []
        for writer, share in enumerate(whole.shares):
            name = shard_name(self._storage, writer, len(whole.shares), whole.commit)
            hasher = Hasher()
            self._storage.write(self._storage.join(self.working, name), Window(share).image, hasher.update)
            if hasher.result() != share.checksum:
                raise CorruptCheckpointError(f"{share.path} is damaged")
            files.append(FileEntry(name=name, bytes=share.image_bytes, checksum=share.checksum))
        return dataclasses.replace(whole.open().manifest, files=tuple(files))


def _check_superseded(storage: Storage, root: str, folder: Path, run_id: str) -> None:
    """What the directory has is newer than memory: if it is the directory of that job. Raises: as `rescue`."""
    held = held_in(folder, run_id)
    if not held:
        return
    newest = max(held, key=lambda whole: (whole.mark.round, whole.mark.step))
    try:
        _Commit(storage, root, folder, newest, 0).check()
    except StaleRoundError as exc:
        logger.warning("step %d in memory is of no use any more: %s", newest.mark.step, exc)


def _look(
    storage: Storage, root: str, folder: Path | None, run_id: str, struck: dict[str, str]
) -> tuple[Whole | None, Saved | None]:
    """What a restore would take from memory, if that is newer than what it would take from disk; and the latter."""
    on_disk, sound = offer(storage, root)
    seen = with_memory(on_disk, folder, run_id)[0] if folder is not None else on_disk
    homes = find_homes([seen], [0], writable=True)
    saved, there = None, choose([dataclasses.replace(seen, candidates=on_disk.candidates)], {}, homes).chosen
    if there is not None and (held := sound[there.commit]()).manifest.run_id == run_id:
        saved = Saved(step=there.step, path=held.path)
    chosen = choose([seen], struck, homes).chosen
    if chosen is None or chosen.tier == "disk" or folder is None:
        return None, saved
    if there is not None and (there.round, there.step) == (chosen.round, chosen.step):
        return None, saved
    return next((whole for whole in held_in(folder, run_id) if whole.commit == chosen.commit), None), saved
