"""The Grafana dashboard and the Prometheus rules that come with the package, and how they get to a directory."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from elastic.errors import UsageError

_FOLDERS = ("grafana", "prometheus")


def shipped() -> dict[str, str]:
    """File name -> text."""
    found = {}
    for folder in _FOLDERS:
        for entry in sorted((resources.files("elastic.metrics") / folder).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith((".json", ".yml")):
                found[entry.name] = entry.read_text(encoding="utf-8")
    return found


def write(directory: Path) -> list[Path]:
    """Write all of them into `directory`; returns where they are. Raises: UsageError."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; name a directory, which is made if need be")
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in shipped().items():
            path = directory / name
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as exc:
        raise UsageError(f"cannot write {exc.filename or directory}: {exc.strerror or exc}") from exc
    return written
