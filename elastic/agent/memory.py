"""The agent's folder in shared memory: what workers keep there outlives them, and goes with the agent.

The folder is held by a lock, so that one whose agent was killed is recognised and freed by the next agent of this user,
once `rescue` has been called with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from elastic.agent.workers import remove_tree

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PLACE_VARIABLE = "ELASTICD_SHM_DIR"  # another place for it
_NEW_SECONDS = 60.0  # a folder that is not locked yet may be one that is being made


@contextlib.contextmanager
def memory_folder(rescue: Callable[[Path], object], environ: Mapping[str, str] = os.environ) -> Iterator[str | None]:
    """A folder of this agent alone, in memory; None, with a warning, where there can be none."""
    place, prefix = _place(environ), _prefix()
    descriptor = -1
    try:
        sweep(place, prefix, rescue)
        making = place / f".{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        folder = place / making.name[1:]
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
        yield str(folder)
    finally:
        remove_tree(folder)
        os.close(descriptor)


def free_memory(rescue: Callable[[Path], object], environ: Mapping[str, str]) -> None:
    """What agents of this user held that were killed, now rather than at the next start."""
    sweep(_place(environ), _prefix(), rescue)


def _place(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(PLACE_VARIABLE) or SHARED_MEMORY)


def _prefix() -> str:
    return f"elasticd-{os.geteuid()}-"


def sweep(place: Path, prefix: str, rescue: Callable[[Path], object]) -> None:
    """Free what agents of this user held that were killed."""
    for folder in [*place.glob(f"{prefix}*"), *place.glob(f".{prefix}*")]:
        with contextlib.suppress(OSError):  # another user's, or one that another agent sweeps at the same time
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_new = folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _NEW_SECONDS
                if not is_new and folder.stat().st_uid == os.geteuid():
                    rescue(folder)
                    remove_tree(folder)
                    logger.info("freed what a killed agent had held in memory: %s", folder)
            finally:
                os.close(descriptor)
