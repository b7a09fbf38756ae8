"""`elasticd checkpoints list|show|verify|prune|export`: asks `checkpoints.catalog` and puts its answers into words."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from elastic.cli_table import human_bytes, table
from elastic.errors import ElasticError, ExitCode, UsageError
from elastic.own_checkpoints import own_checkpoints

Entry = dict[str, Any]
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")  # whoever sees such a name calls torch.load


def run_action(options: argparse.Namespace) -> int:
    """Carries out `options.action`; returns the exit code.

    Raises: UsageError when the directory is not there, ElasticError when the work itself fails.
    """
    directory: str = options.directory
    catalog = own_checkpoints("catalog")  # under this name also when the working directory has a checkpoints.py
    try:
        local = own_checkpoints("storage").local_path(directory)
        if local is not None and not Path(local).is_dir():
            what = "is not a directory" if Path(local).exists() else "does not exist"
            raise UsageError(f"checkpoint directory {directory!r} {what}")
        _name_its_folder(options)
        code: int = _ACTIONS[options.action](catalog, options)
    except own_checkpoints("errors").CheckpointError as exc:
        raise ElasticError(str(exc)) from exc
    except BrokenPipeError:
        raise  # of our own output, not of the directory
    except OSError as exc:
        where = exc.filename or directory
        raise ElasticError(f"checkpoints {options.action}: {where}: {exc.strerror or exc}") from exc
    return code


def _name_its_folder(options: argparse.Namespace) -> None:
    """A path of one checkpoint means that one, where one is wanted. Raises: UsageError where all are."""
    folder, _, name = options.directory.rstrip("/").rpartition("/")
    manifests = own_checkpoints("manifest")
    step = manifests.parse_step(name)
    if step is None or not Path(options.directory, manifests.MANIFEST).exists():
        return
    if options.action not in ("show", "export", "verify") or options.step not in (None, step):
        raise UsageError(f"{options.directory!r} is the checkpoint of step {step} alone: name its folder, {folder!r}")
    options.directory, options.step = folder or ".", step


def _list(catalog: Any, options: argparse.Namespace) -> int:
    entries = catalog.list_checkpoints(options.directory)
    _print(options, entries, _lines(entries) if entries else f"no checkpoints in {options.directory}")
    return int(ExitCode.SUCCEEDED)


def _verify(catalog: Any, options: argparse.Namespace) -> int:
    """What was committed and cannot be restored is a failure; what was never committed is not."""
    entries = catalog.verify(options.directory, options.step)
    corrupt = [entry for entry in entries if entry["state"] == "corrupt"]
    partial = sum(entry["state"] == "partial" for entry in entries)
    read = len(entries) - partial
    summary = f"{len(corrupt)} of {read} corrupt" if corrupt else f"{read} read, none corrupt"
    summary += f"; {partial} never committed" if partial else ""
    _print(options, entries, f"{_lines(entries)}\n\n{summary}" if entries else f"no checkpoints in {options.directory}")
    return int(ExitCode.FAILED if corrupt else ExitCode.SUCCEEDED)


def _show(catalog: Any, options: argparse.Namespace) -> int:
    step = _newest_step(catalog, options.directory) if options.step is None else options.step
    found = catalog.show(options.directory, step)
    facts = {key: value for key, value in found.items() if key not in ("tensors", "files", "state", "checksum")}
    facts |= {"bytes": human_bytes(found["bytes"]), "unix_time": _moment(found["unix_time"])}
    width = max(map(len, facts))
    text = "\n".join(f"{key.ljust(width)}  {value}" for key, value in facts.items())
    files = [(file["name"], file["bytes"], file["checksum"]) for file in found["files"]]
    tensors = [(t["name"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar") for t in found["tensors"]]
    text += f"\n\n{table(('file', 'bytes', 'checksum'), files)}\n\n{table(('tensor', 'dtype', 'shape'), tensors)}"
    _print(options, found, text)
    return int(ExitCode.SUCCEEDED)


def _prune(catalog: Any, options: argparse.Namespace) -> int:
    for name, value in (("--keep-last", options.keep_last), ("--keep-every", options.keep_every)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be 1 or more; the newest checkpoint always stays")
    removed = catalog.prune(options.directory, options.keep_last, options.keep_every, options.dry_run)
    verb = "would be removed" if options.dry_run else "removed"
    _print(options, removed, f"{_lines(removed)}\n\n{len(removed)} {verb}" if removed else "nothing to remove")
    return int(ExitCode.SUCCEEDED)


def _export(catalog: Any, options: argparse.Namespace) -> int:
    if not options.output.absolute().parent.is_dir():
        raise UsageError(
            f"cannot write {str(options.output)!r}: no directory {str(options.output.absolute().parent)!r}"
        )
    if options.output.is_dir():
        raise UsageError(f"{str(options.output)!r} is a directory; name a file such as model.safetensors")
    if options.output.suffix.lower() in _PICKLED:
        better = str(options.output.with_suffix(".safetensors"))
        raise UsageError(f"torch.load could not read {str(options.output)!r}, it is safetensors: name it {better!r}")
    done = catalog.export(options.directory, options.output, options.step, options.only)
    text = f"step {done['step']}: {done['tensors']} tensors, {human_bytes(done['bytes'])}, written to {done['path']}"
    _print(options, done, text)
    return int(ExitCode.SUCCEEDED)


_ACTIONS = {"list": _list, "show": _show, "verify": _verify, "prune": _prune, "export": _export}


def _newest_step(catalog: Any, directory: str) -> int:
    committed = [entry for entry in catalog.list_checkpoints(directory) if entry["state"] == "committed"]
    if not committed:
        raise ElasticError(f"there is no committed checkpoint in {directory}: name the folder of all steps")
    return int(max(committed, key=lambda entry: (entry["round"], entry["step"]))["step"])


def _print(options: argparse.Namespace, data: Any, text: str) -> None:
    print(json.dumps(data) if options.json else text)


def _lines(entries: list[Entry]) -> str:
    headers = ("step", "state", "round", "base step", "world size", "bytes", "time", "path", "reason")
    return table(
        headers,
        [
            (
                *(entry[key] for key in ("step", "state", "round", "base_step", "world_size")),
                human_bytes(entry["bytes"]),
                _moment(entry["time"]),
                entry["path"],
                entry["reason"] or "",
            )
            for entry in entries
        ],
    )


def _moment(unix_time: float | None) -> str | None:
    return None if unix_time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time))
