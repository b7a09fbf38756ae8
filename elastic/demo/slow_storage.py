"""A file system on which each shard takes longer, so that whatever may happen during a save can be made to happen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from elastic.own_checkpoints import own_checkpoints

if TYPE_CHECKING:
    from checkpoints.storage import Observer, Storage


class SlowStorage:
    """Passes everything on to the storage of `directory`, shards after a pause: in the background, as a commit is."""

    def __init__(self, directory: str, pause_seconds: float) -> None:
        self._storage: Storage = own_checkpoints("storage").open_storage(directory)[0]
        self._pause_seconds = pause_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write(self, path: str, data: memoryview | bytes, observe: Observer | None = None) -> None:
        if path.endswith(".safetensors"):
            time.sleep(self._pause_seconds)
        self._storage.write(path, data, observe)
