"""Named tensors and a JSON skeleton -> nested state; the way there is `form.py`.

The skeleton is the state with each tensor replaced by its name; what JSON cannot say is marked by an object with one
key:

    {"~tensor": name}   {"~tuple": [..]}   {"~dict": [[key, value], ..]}   {"~float": "inf"}   {"~bytes": base64}

A dict whose keys are strings, none beginning with "~", is a plain JSON object. Nothing here is ever evaluated or
pickled.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from .errors import CorruptCheckpointError

Nested: TypeAlias = Any  # dict (str or int keys) | list | tuple of tensors, None, bool, int, float, str, bytes
Json: TypeAlias = Any

MAX_DEPTH = 64


def unflatten(skeleton: Json, tensors: Mapping[str, torch.Tensor]) -> Nested:
    """The inverse of `form.flatten`.

    Raises:
        CorruptCheckpointError: the skeleton is not one that a form has.
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


def describe(path: tuple[Any, ...]) -> str:
    """A path as Python would write it: state['optimizer'][0]."""
    return "state" + "".join(f"[{key!r}]" for key in path)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
