"""Nested state -> its form (containers, keys, where the tensors are) and its content (tensors, and all other leaves).

A training loop saves the same tensors under the same keys again and again, and other leaves change. So a form is made
once, and from then on `read` takes the content of a state of that form, at a tenth of what making it costs: a save of
a small state would take longer in Python than in its copy. A form holds on to no tensor.

`hollow` is the state's skeleton (see `tree.py`) with {"~leaf": number} where a leaf is that is no tensor.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .errors import UnsupportedStateError
from .manifest import DTYPES
from .tree import MAX_DEPTH, Json, Nested, describe, dtype_name

_LEAF = "~leaf"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_STORED = frozenset(getattr(torch, name) for name in DTYPES if hasattr(torch, name))


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """In the order of the form's names, and of its numbered leaves (as JSON)."""

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    leaves: list[Json] = dataclasses.field(default_factory=list)


class _Node(Protocol):
    """One place in a form."""

    hollow: Json

    def read(self, value: Nested, content: Content) -> bool:
        """Add what is there to the content; False, after any part of it, when the value has another form."""


class Form:
    """The form of one state; a tensor's name is the keys on the way to it, joined by "/".

    Raises:
        UnsupportedStateError: a leaf cannot be stored.
    """

    def __init__(self, state: Nested) -> None:
        self._names: dict[str, None] = {}
        self._leaves = 0
        self._root = self._node(state, ())
        self.names = tuple(self._names)
        self.hollow = self._root.hollow

    def read(self, state: Nested) -> Content | None:
        """The state's content; None when it has another form. What is wrong with it then, a new form tells."""
        content = Content()
        return content if self._root.read(state, content) else None

    @functools.cached_property
    def text(self) -> str:
        """`hollow`, written."""
        return json.dumps(self.hollow, allow_nan=False)

    def skeleton(self, leaves: Sequence[Json]) -> Json:
        """The state with each tensor replaced by its name."""
        return fill_in(self.hollow, leaves)

    def _node(self, value: Nested, path: tuple[Any, ...]) -> _Node:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if len(path) > MAX_DEPTH:
            raise UnsupportedStateError(
                f"{describe(path)} is nested deeper than {MAX_DEPTH} levels; does it contain itself?"
            )
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) is list or (isinstance(value, tuple) and not hasattr(value, "_fields")):  # torch.Size is a tuple
            return _Sequence(type(value), [self._node(item, (*path, i)) for i, item in enumerate(value)])
        _encode_leaf(value, path)
        self._leaves += 1
        return _Leaf(self._leaves - 1)

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> _Node:
        is_odd = value.layout is not _STRIDED or value.dtype not in _STORED or value.is_meta or value.is_nested
        if is_odd or type(value) not in _PLAIN:
            _refuse_odd_tensor(value, path)
        name = _free_name(_name_of(path), self._names)
        self._names[name] = None
        return _Tensor(type(value), name)

    def _dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> _Node:
        for key in value:
            if type(key) not in (str, int):
                raise UnsupportedStateError(
                    f"{describe(path)} has the key {key!r}, a {type(key).__name__}; keys must be str or int"
                )
        nodes = [self._node(item, (*path, key)) for key, item in value.items()]
        if nodes and all(isinstance(node, _Tensor) for node in nodes):
            return _TensorDict(value, nodes)
        return _Dict(value, nodes)


class _Tensor:
    def __init__(self, kind: type, name: str) -> None:
        self._kind = kind
        self.hollow = {"~tensor": name}

    def read(self, value: Nested, content: Content) -> bool:
        content.tensors.append(value)
        return type(value) is self._kind


class _Leaf:
    def __init__(self, number: int) -> None:
        self.hollow = {_LEAF: number}

    def read(self, value: Nested, content: Content) -> bool:
        try:
            content.leaves.append(_encode_leaf(value, ()))
        except UnsupportedStateError:
            return False
        return True


class _Sequence:
    def __init__(self, kind: type[Any], nodes: list[_Node]) -> None:
        self._kind, self._nodes = kind, nodes
        hollow = [node.hollow for node in nodes]
        self.hollow = hollow if kind is list else {"~tuple": hollow}

    def read(self, value: Nested, content: Content) -> bool:
        if type(value) is not self._kind or len(value) != len(self._nodes):
            return False
        return all(node.read(item, content) for node, item in zip(self._nodes, value, strict=True))


class _Dict:
    def __init__(self, value: dict[Any, Any], nodes: Sequence[_Node]) -> None:
        self._kind, self._keys, self._nodes = type(value), tuple(value), nodes
        items = [(key, node.hollow) for key, node in zip(value, nodes, strict=True)]
        is_plain = all(type(key) is str and not key.startswith("~") for key in value)
        self.hollow = dict(items) if is_plain else {"~dict": [[key, hollow] for key, hollow in items]}

    def _is_alike(self, value: Nested) -> bool:
        return type(value) is self._kind and tuple(value) == self._keys

    def read(self, value: Nested, content: Content) -> bool:
        if not self._is_alike(value):
            return False
        return all(node.read(item, content) for node, item in zip(self._nodes, value.values(), strict=True))


class _TensorDict(_Dict):
    """Nothing but tensors in it: most of a state, and looked at without a call for each."""

    def __init__(self, value: dict[Any, Any], nodes: Sequence[_Node]) -> None:
        super().__init__(value, nodes)
        self._kinds = list(map(type, value.values()))

    def read(self, value: Nested, content: Content) -> bool:
        if not self._is_alike(value):
            return False
        tensors = value.values()
        content.tensors.extend(tensors)
        return list(map(type, tensors)) == self._kinds


def split(state: Nested) -> tuple[Form, Content]:
    """Raises: UnsupportedStateError: a leaf cannot be stored."""
    form = Form(state)
    content = form.read(state)
    if content is None:
        raise UnsupportedStateError("the state changes while it is looked at: another thread writes to it")
    return form, content


def flatten(state: Nested) -> tuple[Json, dict[str, torch.Tensor]]:
    """A state's skeleton and its tensors, by name. Raises: as `split`."""
    form, content = split(state)
    return form.skeleton(content.leaves), dict(zip(form.names, content.tensors, strict=True))


def fill_in(hollow: Json, leaves: Sequence[Json]) -> Json:
    """The skeleton. Raises: LookupError, TypeError: they do not belong together."""
    if isinstance(hollow, list):
        return [fill_in(item, leaves) for item in hollow]
    if not isinstance(hollow, dict):
        return hollow
    if len(hollow) == 1 and _LEAF in hollow:
        return leaves[hollow[_LEAF]]
    return {key: fill_in(value, leaves) for key, value in hollow.items()}


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
    elif tensor.is_nested:
        kind = "a nested tensor; store its parts"
    elif dtype not in DTYPES:
        kind = f"a tensor of dtype {tensor.dtype}, which the file format does not have"
    else:
        return
    raise UnsupportedStateError(f"{describe(path)} is {kind}")


def _free_name(clash: str, taken: Mapping[str, Any]) -> str:
    """Keys that read alike, 0 and "0", are numbered."""
    name, number = clash, 1
    while name in taken:
        number += 1
        name = f"{clash}~{number}"
    return name


def _name_of(path: tuple[Any, ...]) -> str:
    """The path as one string; "~" and "/" in keys are written as in JSON pointers."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path) or "~root"
