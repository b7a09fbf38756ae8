"""A job's settings as a TOML file: the flags' names with `_`, plus `script` or `module`, `args` and the table [nccl].

Reads and checks one file by what the command line's parser knows of each flag; does not know what a setting means.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic import values
from elastic.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TARGET_KEYS = ("script", "module", "args")
_NCCL = "nccl"
_SHOWN_CHARACTERS = 100  # of a line that cannot be read
# Options whose text is more than a number, but for which a bare number is what everybody writes first.
_INTEGER_TOO = frozenset(
    {"nnodes", "nproc_per_node", "checkpoint_every", "memory_every", "redirects", "tee", "local_ranks_filter", "http"}
)
_LISTS = {"preload": ",", "duplicate_stdout_filters": ",,", "duplicate_stderr_filters": ",,", "local_ranks_filter": ","}


def read(path: Path, options: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """The file's settings by the names argparse gives them; `script`, `module` and `args` become the positionals.

    `options` are the flags that a file may set. Raises: UsageError naming the file and the key or line.
    """
    table = _parse(path)
    _refuse_nul(path, table)
    known = (*options, *_TARGET_KEYS)
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key == _NCCL:
            settings[key] = _nccl(path, value)
            continue
        if isinstance(value, dict):
            raise UsageError(
                f"{path}: table [{key}] is not supported, [nccl] alone is; settings are top-level keys"
                f"{_suggest(key, known)}"
            )
        if key not in known:
            raise UsageError(f"{path}: unknown key {key!r}{_suggest(key, known)}")
        if key not in _TARGET_KEYS:
            settings[key] = _convert(path, key, value, options[key])
    return {**settings, **_target(path, table)}


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
        return tomllib.loads(text)
    except OSError as exc:
        raise UsageError(f"cannot read job file {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        line = exc.object[: exc.start].count(b"\n") + 1
        raise UsageError(f"job file {path} is not UTF-8 (line {line}): save it as UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"job file {path} is not valid TOML: {exc}{_place(str(exc), text)}") from exc


def _place(error: str, text: str) -> str:
    """The line that the parser could not read, and what is mostly wrong with it."""
    at = re.search(r"at line (\d+)", error)
    line = text.split("\n")[int(at[1]) - 1].strip()[:_SHOWN_CHARACTERS] if at else ""
    shown = f": {line if line.isprintable() else repr(line)}" if line else ""
    unquoted = error.startswith(("Invalid value", "Expected newline"))
    return shown + ('; strings and times are written in quotes: hang_timeout = "10m"' if unquoted else "")


def _refuse_nul(path: Path, table: Mapping[str, Any]) -> None:
    """No path, argument or variable of a process can hold it."""
    for key, value in table.items():
        if isinstance(value, dict):
            _refuse_nul(path, value)
        elif any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, list) else [value])):
            raise UsageError(f"{path}: {key} = {value!r} holds a NUL character")


def _suggest(key: str, known: tuple[str, ...]) -> str:
    """How to go on from a key that is none."""
    if key.startswith("training_script"):
        return '; write script = "train.py" and args = ["..."]'
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; keys are the flags' names with _ for -"


def _convert(path: Path, key: str, value: Any, option: argparse.Action) -> Any:
    """A TOML value as the flag would have given it."""
    if option.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise UsageError(f"{path}: {key} = {value!r} must be true or false")
        return value
    if isinstance(value, list) and key in _LISTS:
        value = _joined(path, key, value)
    expected, allowed = _expected(key, option)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise UsageError(f"{path}: {key} = {value!r} must be {expected}")
    return convert_text(f"{path}: {key} = {value!r}", str(value), option)


def convert_text(name: str, text: str, option: argparse.Action) -> Any:
    """What `option` makes of `text`, with its choices checked; `name` starts the message of the UsageError."""
    try:
        value = option.type(text) if callable(option.type) else text
    except argparse.ArgumentTypeError as exc:
        raise UsageError(f"{name}: {exc}") from exc
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{name}: invalid {getattr(option.type, '__name__', 'value')}") from exc
    if option.choices is not None and value not in option.choices:
        raise UsageError(f"{name}: choose one of {', '.join(map(str, option.choices))}")
    return value


def _expected(key: str, option: argparse.Action) -> tuple[str, tuple[type, ...]]:
    if option.type in (values.seconds, values.whole_seconds):
        return 'a number of seconds, or a time such as "10m"', (str, int, float)
    if option.type is int:
        return "a whole number", (int,)
    if isinstance(option.default, float) or option.type is float:
        return "a number", (int, float)
    if key in _LISTS:
        return "a string or an array", (str, int)
    return ("a number or a string", (str, int)) if key in _INTEGER_TOO else ("a string", (str,))


def _nccl(path: Path, table: Any) -> dict[str, str]:
    """Variables for NCCL by their full names: those that its manual has, and that a search through a cluster finds."""
    if not isinstance(table, dict):
        raise UsageError(f'{path}: nccl = {table!r} must be a table: [nccl] and below it NCCL_ALGO = "Ring"')
    for key, value in table.items():
        if not re.fullmatch(r"NCCL_[A-Z0-9_]+", key):
            full = f"NCCL_{key.upper()}" if re.fullmatch(r"\w+", key, re.ASCII) else "NCCL_ALGO"
            raise UsageError(
                f"{path}: {key!r} in [nccl] is no variable of NCCL's; they are written in full, such as {full}"
            )
        if not isinstance(value, (str, int)):
            raise UsageError(f"{path}: {key} = {value!r} in [nccl] must be a string, a whole number, true or false")
        if isinstance(value, str) and not value.isprintable():
            raise UsageError(f"{path}: {key} = {value!r} in [nccl] holds a control character")
    return {key: str(int(value) if isinstance(value, bool) else value) for key, value in table.items()}


def _joined(path: Path, key: str, items: list[Any]) -> str:
    if not all(isinstance(item, str) or (key == "local_ranks_filter" and type(item) is int) for item in items):
        raise UsageError(f"{path}: {key} = {items!r} must be an array of strings")
    return ",".join(str(item).replace(",", _LISTS[key]) for item in items)


def _target(path: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """What to run, as the command line's positionals say it."""
    named = [key for key in ("script", "module") if key in table]
    if len(named) == 2:
        raise UsageError(f"{path}: script = {table['script']!r} and module = {table['module']!r}: give one of them")
    if not named:
        if "args" in table:
            raise UsageError(f"{path}: args needs script or module beside it; on a command line they follow the script")
        return {}
    (key,) = named
    if not isinstance(table[key], str) or not table[key]:
        raise UsageError(f"{path}: {key} = {table[key]!r} must be a string that names what to run")
    args = table.get("args", [])
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise UsageError(f'{path}: args = {args!r} must be an array of strings, such as ["--lr", "0.1"]')
    return {"training_script": table[key], "module": key == "module", "training_script_args": args}
