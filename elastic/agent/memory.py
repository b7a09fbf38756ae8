"""The agent's folder in shared memory: what workers keep there outlives them, and goes with the agent.

The folder is held by a lock, which the workers and the warden inherit: one whose agent was killed is recognised and
freed by the next agent of this user once they are dead too, and a `Finder` has seen to what is in it. What cannot be
saved the next agent of that job takes over as its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from elastic.agent.workers import remove_tree

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PLACE_VARIABLE = "ELASTICD_SHM_DIR"  # another place for it
_KEPT = "unsaved"
_NEW_SECONDS = 60.0  # a folder that is not locked yet may be one that is being made


class Finder(Protocol):
    """Who comes upon a folder whose agent is gone."""

    def may_free(self, folder: Path) -> bool:
        """Called with the folder locked: whether nothing in it is needed any more."""

    def takes_over(self, folder: Path) -> bool:
        """Called when it is needed: whether the agent that is about to start goes on with it as its own."""

    def waits_for(self, folder: Path) -> bool:
        """Called while another process has it locked: whether to look again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A folder that is locked by its descriptor."""

    folder: Path
    descriptor: int


@contextlib.contextmanager
def memory_folder(environ: Mapping[str, str] = os.environ, inheritance: Held | None = None) -> Iterator[Held | None]:
    """A folder of this agent alone, in memory; None, with a warning, where there can be none.

    `inheritance`: of an agent that is gone, to go on with. It stays when this one ends, until `free_memory`.
    """
    place, prefix = _place(environ), _prefix()
    descriptor = inheritance.descriptor if inheritance is not None else -1
    try:
        making = place / f".{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        folder = place / making.name[1:]
        if inheritance is not None:
            keep_memory(inheritance.folder)
            making = inheritance.folder
        else:
            making.mkdir(mode=0o700)
            descriptor = os.open(making, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        making.rename(folder)  # from now on others see it, and it is locked
    except OSError as exc:
        logger.warning("checkpoints in memory are off: %s cannot be used: %s", place, exc.strerror or exc)
        if descriptor >= 0:
            os.close(descriptor)
        yield None
        return
    try:
        yield Held(folder, descriptor)
    finally:
        if not is_kept(folder):
            remove_tree(folder)
        os.close(descriptor)


def keep_memory(folder: Path) -> None:
    """It stays when its agent ends, until a `Finder` frees it. Raises: OSError."""
    (folder / _KEPT).touch()


def is_kept(folder: Path) -> bool:
    return (folder / _KEPT).exists()


def free_memory(folder: Path) -> None:
    """It goes with its agent after all."""
    with contextlib.suppress(OSError):
        (folder / _KEPT).unlink()


def sweep(finder: Finder, environ: Mapping[str, str] = os.environ) -> Held | None:
    """See to what agents of this user held that are gone, and free it. Returns what is to be taken over."""
    place, prefix, taken = _place(environ), _prefix(), None
    for folder in [*place.glob(f"{prefix}*"), *place.glob(f".{prefix}*")]:
        with contextlib.suppress(OSError):  # gone, or another user's
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _take(descriptor, folder, finder):
                    if finder.may_free(folder):
                        remove_tree(folder)
                        logger.info("freed what an agent that is gone had held in memory: %s", folder)
                    elif taken is None and finder.takes_over(folder):
                        taken = Held(folder, os.dup(descriptor))  # the same lock
            finally:
                os.close(descriptor)
    return taken


def _take(descriptor: int, folder: Path, finder: Finder) -> bool:
    """Whether the folder is locked by us now, and ours to see to."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():  # what another user has put there is nothing to wait for, nor to read
        return False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not finder.waits_for(folder):
                return False
    return not folder.name.startswith(".") or time.time() - status.st_mtime >= _NEW_SECONDS


def _place(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(PLACE_VARIABLE) or SHARED_MEMORY)


def _prefix() -> str:
    return f"elasticd-{os.geteuid()}-"
