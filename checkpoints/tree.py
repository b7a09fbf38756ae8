"""Nested state <-> named tensors and a JSON skeleton.

The skeleton is the state with each tensor replaced by its name; what JSON cannot say is marked by an object with one
key:

    {"~tensor": name}   {"~tuple": [..]}   {"~dict": [[key, value], ..]}   {"~float": "inf"}   {"~bytes": base64}

A dict whose keys are strings, none beginning with "~", is a plain JSON object. Nothing here is ever evaluated or
pickled.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from .errors import CorruptCheckpointError, UnsupportedStateError
from .manifest import DTYPES

Nested: TypeAlias = Any  # dict (str or int keys) | list | tuple of tensors, None, bool, int, float, str, bytes
Json: TypeAlias = Any

MAX_DEPTH = 64
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_STORED = frozenset(getattr(torch, name) for name in DTYPES if hasattr(torch, name))


def flatten(state: Nested) -> tuple[Json, dict[str, torch.Tensor]]:
    """Split a state into its skeleton and its tensors, by name: the keys on the way joined by "/".

    Raises:
        UnsupportedStateError: a leaf cannot be stored; nothing has been copied yet.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(state, (), tensors), tensors


def unflatten(skeleton: Json, tensors: Mapping[str, torch.Tensor]) -> Nested:
    """The inverse of `flatten`.

    Raises:
        CorruptCheckpointError: the skeleton is not one that `flatten` makes.
    """
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        (mark, value), *_ = skeleton.items()
        if mark.startswith("~"):
            return _decode_marked(mark, value, tensors)
    return {key: unflatten(value, tensors) for key, value in skeleton.items()}


def _encode(value: Nested, path: tuple[Any, ...], tensors: dict[str, torch.Tensor]) -> Json:
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN or value.layout is not _STRIDED or value.is_meta or value.dtype not in _STORED:
            _refuse_odd_tensor(value, path)
        name = _name_of(path)
        if name in tensors:
            name = _free_name(name, tensors)
        tensors[name] = value
        return {"~tensor": name}
    if len(path) > MAX_DEPTH:
        raise UnsupportedStateError(
            f"{describe(path)} is nested deeper than {MAX_DEPTH} levels; does it contain itself?"
        )
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if type(value) is list:
        return [_encode(item, (*path, i), tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # torch.Size comes back as a tuple
        return {"~tuple": [_encode(item, (*path, i), tensors) for i, item in enumerate(value)]}
    return _encode_leaf(value, path)


def _encode_dict(value: dict[Any, Any], path: tuple[Any, ...], tensors: dict[str, torch.Tensor]) -> Json:
    plain = True
    for key in value:
        if type(key) not in (str, int):
            raise UnsupportedStateError(
                f"{describe(path)} has the key {key!r}, a {type(key).__name__}; keys must be str or int"
            )
        plain = plain and type(key) is str and not key.startswith("~")
    items = [(key, _encode(item, (*path, key), tensors)) for key, item in value.items()]
    return dict(items) if plain else {"~dict": [[key, item] for key, item in items]}


def _encode_leaf(value: Any, path: tuple[Any, ...]) -> Json:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"~float": repr(float(value))}
    if type(value) is bytes:
        return {"~bytes": base64.b64encode(value).decode("ascii")}
    raise UnsupportedStateError(
        f"{describe(path)} is a {type(value)}; a checkpoint holds nested dicts, lists and tuples of tensors, None, "
        "bool, int, float, str and bytes: convert it, or leave it out of the state"
    )


def _refuse_odd_tensor(tensor: torch.Tensor, path: tuple[Any, ...]) -> None:
    dtype = dtype_name(tensor.dtype)
    if type(tensor) not in _PLAIN and not isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer)):
        kind = f"a {type(tensor)}; store its plain local tensor instead"
    elif tensor.layout is not torch.strided:
        kind = f"a tensor of layout {tensor.layout}; store its parts, or tensor.to_dense()"
    elif tensor.device.type == "meta":
        kind = "a tensor on the meta device: it has no data"
    elif dtype not in DTYPES:
        kind = f"a tensor of dtype {tensor.dtype}, which the file format does not have"
    else:
        return
    raise UnsupportedStateError(f"{describe(path)} is {kind}")


def _decode_marked(mark: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> Nested:
    try:
        if mark == "~tensor":
            return tensors[value]
        if mark == "~tuple":
            return tuple(unflatten(item, tensors) for item in value)
        if mark == "~dict":
            return {key: unflatten(item, tensors) for key, item in value}
        if mark == "~float":
            return float(value)
        if mark == "~bytes":
            return base64.b64decode(value, validate=True)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise CorruptCheckpointError(f"the manifest's state has a bad {mark} entry: {exc}") from exc
    raise CorruptCheckpointError(f"the manifest's state has an entry of the unknown kind {mark!r}")


def _free_name(clash: str, taken: Mapping[str, Any]) -> str:
    """Keys that read alike, 0 and "0", are numbered."""
    name, number = clash, 1
    while name in taken:
        number += 1
        name = f"{clash}~{number}"
    return name


@functools.lru_cache(1 << 16)
def _name_of(path: tuple[Any, ...]) -> str:
    """The path as one string; "~" and "/" in keys are written as in JSON pointers."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path) or "~root"


def describe(path: tuple[Any, ...]) -> str:
    """A path as Python would write it: state['optimizer'][0]."""
    return "state" + "".join(f"[{key!r}]" for key in path)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
