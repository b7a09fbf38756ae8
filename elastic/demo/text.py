"""Text as bytes: by default Python's own library, which every machine that runs this has. Imports no torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from elastic.errors import UsageError

LARGEST_BYTES = 4 << 20  # of the text that is used; the rest is left out


def default_text() -> Path:
    """The sources of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_text(source: Path, *, limit_bytes: int = LARGEST_BYTES) -> bytes:
    """The bytes of a file, or of a folder's files one after another, up to `limit_bytes`; always in the same order.

    Of a folder, its *.py files where it has any directly inside, otherwise every file below it that is not hidden.

    Raises:
        UsageError: there is nothing to read.
    """
    parts: list[bytes] = []
    left = limit_bytes
    try:
        for path in _files(source):
            if left <= 0:
                break
            with path.open("rb") as file:
                parts.append(file.read(left))
            left -= len(parts[-1])
    except OSError as exc:
        raise UsageError(f"--data {source}: {exc.strerror or exc}; give a file or a folder that can be read") from exc
    if left == limit_bytes:
        raise UsageError(f"--data {source} has no text; give a file or a folder with some")
    return b"".join(parts)


def count_windows(text: bytes, *, context: int) -> int:
    """How many windows of `context` bytes and the one after them the text is cut into.

    Raises:
        UsageError: it is too short for one.
    """
    windows = (len(text) - 1) // context
    if windows < 1:
        raise UsageError(
            f"the text has {len(text)} bytes and a window of --context {context} needs {context + 1}; give more text"
        )
    return windows


def _files(source: Path) -> Iterator[Path]:
    if not source.is_dir():
        yield source  # opening it says what is wrong with it
        return
    if python := sorted(source.glob("*.py")):
        yield from python
        return
    below = (path for path in source.rglob("*") if path.is_file())
    yield from sorted(path for path in below if not any(p.startswith(".") for p in path.relative_to(source).parts))
