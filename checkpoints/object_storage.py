"""Object stores and whatever else fsspec reaches by URL. The only importer of fsspec.

There is no atomic rename of a directory there, so a commit writes its shards under unique names in the final place
and the manifest last: putting one object is atomic.
"""

from __future__ import annotations

from typing import IO, cast

import fsspec

from .storage import CHUNK_BYTES, Observer, Storage


class ObjectStorage(Storage):
    """Files behind an fsspec URL such as s3://bucket/run; credentials are fsspec's business."""

    renames = False

    def __init__(self, url: str) -> None:
        self._files, _ = fsspec.core.url_to_fs(url)

    def make_directory(self, path: str) -> None:
        self._files.makedirs(path, exist_ok=True)

    def make_new_directory(self, path: str) -> bool:
        self.make_directory(path)
        return True

    def write(self, path: str, data: memoryview | bytes, observe: Observer | None = None) -> None:
        view = memoryview(data).cast("B")
        with self._files.open(path, "wb") as file:
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                if observe is not None:
                    observe(chunk)
                file.write(chunk)

    def replace(self, path: str, data: bytes) -> None:
        self._files.pipe_file(path, data)

    def rename(self, source: str, target: str) -> None:
        raise OSError(f"cannot rename {source} to {target}: an object store has no atomic rename")

    def swap(self, first: str, second: str) -> bool:
        return False

    def sync_directory(self, path: str) -> None:
        """Nothing to do: an object is durable once it is put."""

    def remove_tree(self, path: str) -> None:
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def remove(self, path: str) -> None:
        if self._files.exists(path):
            self._files.rm_file(path)

    def names(self, path: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in self._files.ls(path, detail=False))
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int | None:
        try:
            info = self._files.info(path)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def open(self, path: str) -> IO[bytes]:
        return cast("IO[bytes]", self._files.open(path, "rb"))
