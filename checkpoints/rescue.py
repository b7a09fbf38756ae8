"""What only a node's memory holds when nobody trains any more: committed to disk, for the next start to go on from.

Called by the owner of the memory once its workers are gone. The state is an ordinary checkpoint from then on, of the
round that kept it; whatever keeps a commit of the newest round from a directory keeps this one from it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from pathlib import Path

from .choose import choose, find_homes
from .claim import Claim
from .errors import CheckpointError, CorruptCheckpointError
from .held import Whole, held_in
from .line import Line
from .manifest import FileEntry, Hasher, Manifest, step_name
from .offer import offer, with_memory
from .publish import discard, publish, shard_name, working_directory
from .slot import Window
from .storage import Storage, open_storage

logger = logging.getLogger(__name__)
_NONCE = "rescued"  # the same on every node: who makes the directory of that name does it
_AGAIN_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rescued:
    """The checkpoint that memory's state has become."""

    step: int
    path: str


def rescue(
    folder: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    run_id: str,
    *,
    is_first: bool = True,
    patience_seconds: float = 60.0,
) -> Rescued | None:
    """Commit the newest whole state of the run in `folder`, unless the directory has one as new; then None.

    Of several nodes that see one directory one does it, and the others wait until it has. On an object store, where
    they cannot see that, only the one that `is_first` does. A state that is damaged gives way to the one before it.

    Raises:
        StaleRoundError: the job has gone on elsewhere.
        CheckpointError: the directory is not the one that the job was in, or another node has not finished in time.
        OSError: it cannot be written there.
    """
    storage, root = open_storage(directory)
    if not storage.renames and not is_first:
        return None
    deadline = time.monotonic() + patience_seconds
    struck: dict[str, str] = {}
    by_another: Rescued | None = None
    while (whole := _newest(storage, root, Path(folder), run_id, struck)) is not None:
        step = whole.mark.step
        commit = _Commit(storage, root, Path(folder), whole)
        if commit.begin():
            logger.info("step %d is in memory alone: saving it to %s", step, root)
            try:
                return Rescued(step=step, path=commit.run())
            except CorruptCheckpointError as exc:
                logger.warning("step %d in memory is passed over: %s", step, exc)
                struck[whole.commit] = str(exc)
        elif time.monotonic() >= deadline:
            raise CheckpointError(f"{commit.working} is there, and whoever made it has not finished")
        else:
            if by_another is None:
                logger.info("step %d is in memory alone: another node is saving it to %s", step, root)
            by_another = Rescued(step=step, path=storage.join(root, step_name(step)))
            time.sleep(_AGAIN_SECONDS)
    return by_another


class _Commit:
    """Of what memory holds whole, without ranks: one process has all the shares."""

    def __init__(self, storage: Storage, root: str, folder: Path, whole: Whole) -> None:
        self._storage, self._root, self._whole = storage, root, whole
        self._claim = Claim(storage, root, folder)
        self.working = working_directory(storage, root, whole.mark.step, whole.mark.round, _NONCE)

    def begin(self) -> bool:
        """Whether it is ours to do, and not another node's. Raises: CheckpointError, OSError."""
        self._claim.check(self._line)
        self._storage.make_directory(self._root)
        return self._storage.make_new_directory(self.working)

    def run(self) -> str:
        """Returns the checkpoint's path. Raises: CheckpointError, OSError; nothing is left of it then."""
        try:
            manifest = self._write()
            self._claim.check(self._line)
            return publish(self._storage, self._root, self.working, manifest)
        except BaseException:
            with contextlib.suppress(OSError):
                discard(self._storage, self.working, self._whole.commit)
            raise

    @property
    def _line(self) -> Line:
        """Whose commit it is: of the last round that this memory took part in, which may have restored it."""
        mark = self._whole.mark
        return Line(
            run_id=mark.run_id,
            incarnation=mark.incarnation,
            round=max(mark.round, self._claim.newest_round),
            base_step=mark.base_step,
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


def _newest(storage: Storage, root: str, folder: Path, run_id: str, struck: dict[str, str]) -> Whole | None:
    """What a restore would take from memory, where that is newer than what it would take from the directory."""
    on_disk, _ = offer(storage, root)
    seen, _ = with_memory(on_disk, folder, run_id)
    chosen = choose([seen], struck, find_homes([seen], [0], writable=True)).chosen
    if chosen is None or chosen.tier != "memory":
        return None
    if any((there.round, there.step) == (chosen.round, chosen.step) for there in on_disk.candidates):
        return None
    return next((whole for whole in held_in(folder, run_id) if whole.commit == chosen.commit), None)
