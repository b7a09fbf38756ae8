"""What a node holds whole in memory, as manifests and files like those of a checkpoint on disk."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, TypeAlias, cast

import xxhash

from . import manifest as manifests
from .errors import CorruptCheckpointError
from .manifest import MANIFEST, FileEntry, Manifest
from .shards import partition
from .slot import Mark, Share, Window, parse_words, read_slot
from .storage import Readable

logger = logging.getLogger(__name__)

Opener: TypeAlias = Callable[[], "Held"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A whole state and where its files are read."""

    files: Readable
    path: str
    manifest: Manifest


def opened(held: Held) -> Opener:
    """What is open already."""
    return lambda: held


class MemoryFiles:
    """The slots of one step as the files of a checkpoint (`storage.Readable`)."""

    def __init__(self, shares: Mapping[str, Share], manifest: Manifest) -> None:
        self._shares, self._manifest = shares, manifest

    def join(self, directory: str, *names: str) -> str:
        return names[-1]

    def open(self, path: str) -> IO[bytes]:
        if path == MANIFEST:
            return io.BytesIO(manifests.dump(self._manifest))
        return cast("IO[bytes]", Window(self._shares[path]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A state of which every share lies sealed in one folder, by writer.

    Nodes that kept the same step with the same words beside the tensors come to the same commit.
    """

    commit: str
    mark: Mark
    folder: Path
    shares: tuple[Share, ...]

    def open(self) -> Held:
        """Raises: CorruptCheckpointError."""
        words, mark = parse_words(self.shares[0]), self.mark
        named = {share.path.name: share for share in self.shares}
        manifest = Manifest(
            run_id=mark.run_id,
            incarnation=mark.incarnation,
            round=mark.round,
            base_step=mark.base_step,
            step=mark.step,
            world_size=mark.world_size,
            samples=mark.samples,
            fingerprint=mark.fingerprint,
            commit=self.commit,
            unix_time=mark.unix_time,
            state=words.state,
            tensors=words.tensors,
            pieces=partition(words.tensors, len(self.shares)),
            files=tuple(
                FileEntry(name=name, bytes=share.image_bytes, checksum=share.checksum) for name, share in named.items()
            ),
        )
        return Held(files=MemoryFiles(named, manifest), path=str(self.folder), manifest=manifest)


def held_in(folder: Path, run_id: str) -> list[Whole]:
    """The states of that run that are whole in `folder`."""
    shares: dict[tuple[str, int, str], dict[int, Share]] = {}
    for share in _sealed(folder):
        text = share.text
        if text.mark.run_id == run_id:
            shares.setdefault((text.mark.state, text.writers, text.digest), {})[text.writer] = share
    found = []
    for (state, writers, digest), parts in shares.items():
        if sorted(parts) == list(range(writers)):
            mark = parts[0].text.mark
            words = repr((digest, mark.samples, mark.fingerprint)).encode() + parts[0].words
            commit = f"{state}-{xxhash.xxh3_64_hexdigest(words)}"
            found.append(Whole(commit=commit, mark=mark, folder=folder, shares=tuple(parts[w] for w in range(writers))))
        else:
            logger.debug("%s of %s is not whole: %d of %d shares", state, folder, len(parts), writers)
    return found


def _sealed(folder: Path) -> Iterable[Share]:
    for path in sorted(folder.glob("rank-*-slot-*")):
        try:
            share = read_slot(path)
        except (CorruptCheckpointError, OSError) as exc:
            logger.warning("what memory holds is passed over: %s", exc)
            continue
        if share is not None:
            yield share
