"""A form tells in little time that a state is like the one before, and is never taken in by one that is not."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.errors import UnsupportedStateError
from checkpoints.form import Form, fill_in, flatten
from checkpoints.manager import CheckpointManager
from checkpoints.plan import Planner


def make_state() -> dict[str, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    square = torch.arange(9.0).reshape(3, 3)
    moments = {number: {"step": torch.tensor(1.0), "m": torch.ones(3), "lr": 0.1} for number in range(3)}
    return {
        "model": {"weight": weight, "tied": weight, "square": square, "same": square},
        "optimizer": {"state": moments, "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1, 2]}]},
        "position": (7, "epoch", None, True, b"bytes"),
        "empty": {},
    }


def test_other_leaves_are_no_other_form() -> None:
    state = make_state()
    form = Form(state)
    state["optimizer"]["state"][1]["lr"] = float("inf")
    state["position"] = (8, 2.5, b"x", None, False)
    state["optimizer"]["groups"][0]["betas"] = (1, None)
    content = form.read(state)
    assert content is not None
    assert form.skeleton(content.leaves) == flatten(state)[0]
    assert dict(zip(form.names, content.tensors, strict=True)) == flatten(state)[1]


ANOTHER_FORM: dict[str, Callable[[dict[str, Any]], object]] = {
    "a key more": lambda s: s["model"].update(bias=torch.ones(1)),
    "a key less": lambda s: s["model"].pop("same"),
    "another order": lambda s: s["model"].update(weight=s["model"].pop("weight")),
    "a tensor for a leaf": lambda s: s["optimizer"]["state"][0].update(lr=torch.tensor(0.1)),
    "a leaf for a tensor": lambda s: s["optimizer"]["state"][0].update(m=1.0),
    "a leaf among tensors": lambda s: s["model"].update(same=None),
    "a parameter for a tensor": lambda s: s["model"].update(weight=torch.nn.Parameter(s["model"]["weight"])),
    "a longer list": lambda s: s["optimizer"]["groups"].append({}),
    "a list for a tuple": lambda s: s.update(position=list(s["position"])),
    "another kind of dict": lambda s: s.update(model=collections.OrderedDict(s["model"])),
    "no dict": lambda s: s.update(empty=[]),
    "what cannot be stored": lambda s: s.update(position=(object(), 1, 2, 3, 4)),
    "a set": lambda s: s.update(empty=set()),
}


@pytest.mark.parametrize("change", ANOTHER_FORM.values(), ids=ANOTHER_FORM)
def test_another_form_is_seen(change: Callable[[dict[str, Any]], object]) -> None:
    state = make_state()
    form = Form(state)
    change(state)
    assert form.read(state) is None


def test_a_hollow_skeleton_is_filled_in_whatever_the_keys_are() -> None:
    state = {"~leaf": 1, "a": {"~leaf": {"~leaf": 2}}, "b": [(3,), {0: 4}]}
    form = Form(state)
    content = form.read(state)
    assert content is not None
    assert content.leaves == [1, 2, 3, 4]
    assert fill_in(form.hollow, content.leaves) == flatten(state)[0]


def _transposed(state: dict[str, Any]) -> None:
    state["model"]["square"].data = state["model"]["square"].data.t()


def _in_half(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][2]["m"].data = torch.ones(3, dtype=torch.float16)


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    *(change for name, change in ANOTHER_FORM.items() if name not in ("what cannot be stored", "a set")),
    lambda s: s["model"].update(tied=torch.zeros(2, 3)),
    lambda s: s["model"].update(weight=torch.zeros(4, 3)),
    lambda s: s["optimizer"]["state"].update({1: {"step": torch.tensor(2.0), "m": torch.zeros(3), "lr": 1}}),
    lambda s: s["model"].update(square=torch.zeros(3, 3, dtype=torch.complex64).conj()),
    lambda s: s["model"]["weight"].resize_(3, 2),
    lambda s: s.update(position=(1,)),
    _transposed,
    _in_half,
    lambda s: None,
]


@pytest.mark.parametrize("seed", range(40))
def test_a_planner_that_has_seen_much_plans_like_one_that_has_seen_nothing(seed: int) -> None:
    chance, old = random.Random(seed), Planner()
    state = make_state()
    for _ in range(12):
        for seen in (state, copy.copy(state)):
            snapshot, tensors = old.plan(seen, writer=0, writers=2)
            fresh, expected = Planner().plan(seen, writer=0, writers=2)
            assert snapshot.plan == fresh.plan
            assert snapshot.skeleton == fresh.skeleton
            assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in expected]
        change = chance.choice(CHANGES)
        try:
            change(state)
        except (KeyError, AttributeError, RuntimeError):  # an earlier change has taken away what this one changes
            state = make_state()


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, 3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_cannot_be_stored_any_more_is_refused(make: Callable[[], torch.Tensor]) -> None:
    odd, state, planner = make(), make_state(), Planner()
    planner.plan(state, writer=0, writers=1)
    state["model"]["square"] = odd
    for _ in range(2):
        with pytest.raises(UnsupportedStateError, match=r"state\['model'\]\['square'\]"):
            planner.plan(state, writer=0, writers=1)
    state["model"]["square"] = torch.eye(3)
    planner.plan(state, writer=0, writers=1)


def test_what_is_read_with_another_sign_is_not_the_same_tensor(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    state = {"imag": number.imag, "of the conjugate": number.conj().imag, "conjugate": number.conj(), "plain": number}
    with contextlib.closing(CheckpointManager(tmp_path)) as manager:
        manager.save(1, state)
    with contextlib.closing(CheckpointManager(tmp_path)) as manager:
        restored = manager.restore()
    assert restored is not None
    for name, tensor in state.items():
        assert torch.equal(restored.state[name], tensor.resolve_neg().resolve_conj()), name
