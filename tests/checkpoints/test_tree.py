"""Nested state <-> named tensors and a JSON skeleton."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import pytest
import torch

from checkpoints.errors import CorruptCheckpointError, UnsupportedStateError
from checkpoints.form import flatten
from checkpoints.tree import unflatten
from tests.checkpoints.support import assert_same, small_state


def round_trip(state: Any) -> Any:
    skeleton, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


@pytest.mark.parametrize(
    "state",
    [
        small_state(1),
        {},
        [],
        (),
        None,
        torch.ones(2),
        {0: "int key", "0": "str key", -3: ()},
        {"~tensor": 1, "a/b": {"~": [2]}, "": ""},
        {"~tuple": [1]},
        [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.0, 10**40, -1],
        {"text": "\ud800 \u2028 \U0001f600", "bytes": b"", "nested": [[[()]], ({},)]},
    ],
    ids=str,
)
def test_state_comes_back_exactly_with_types_and_order(state: Any) -> None:
    assert_same(round_trip(state), state)


def test_keys_that_would_give_the_same_name_keep_their_own_tensors() -> None:
    state = {0: torch.tensor(1), "0": torch.tensor(2), "a/b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    _, tensors = flatten(state)
    assert len(tensors) == 4
    assert_same(round_trip(state), state)


def test_names_are_the_keys_joined_by_slashes() -> None:
    _, tensors = flatten(
        {"model": {"layer.0.weight": torch.ones(1)}, "optimizer": {"state": {7: {"m": torch.ones(1)}}}}
    )
    assert list(tensors) == ["model/layer.0.weight", "optimizer/state/7/m"]


def test_ordered_dict_of_a_module_comes_back_as_a_dict() -> None:
    module = torch.nn.Linear(2, 3)
    restored = round_trip({"model": module.state_dict(), "raw": collections.OrderedDict(module.named_parameters())})
    module.load_state_dict(restored["model"])
    assert type(restored["raw"]) is dict


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizer": {"foo": {1, 2}}}, r"state\['optimizer'\]\['foo'\] is a <class 'set'>"),
        ({"a": [object()]}, r"state\['a'\]\[0\] is a <class 'object'>"),
        ({"a": Point(1, 2)}, r"state\['a'\] is a <class .*Point"),
        ({"a": 1j}, r"complex"),
        ({("a", 1): 2}, r"key \('a', 1\), a tuple"),
        ({True: 2}, r"key True, a bool"),
        ({"a": torch.eye(2).to_sparse()}, r"state\['a'\] is a tensor of layout torch.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, r"meta device"),
        ({"a": torch.float32}, r"torch.dtype"),
        ({"a": lambda: 0}, r"function"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_full_key(state: Any, message: str) -> None:
    with pytest.raises(UnsupportedStateError, match=message):
        flatten(state)


def test_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(UnsupportedStateError, match="contain itself"):
        flatten(state)


@pytest.mark.parametrize("skeleton", [{"~tensor": "gone"}, {"~pickle": "x"}, {"~dict": [1]}, {"~bytes": "*"}])
def test_damaged_skeleton_is_called_corrupt(skeleton: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="the manifest's state"):
        unflatten(skeleton, {})
