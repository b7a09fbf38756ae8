"""Model and optimizer as plain nested data and back: names instead of indices, tensors put in as they are.

`Optimizer.load_state_dict` casts its tensors to the parameter's dtype (fp32 moments of bf16 weights would be rounded),
so the state is put into the optimizer directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elastic.errors import JobFailedError


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """A lasting name for each parameter of the optimizer; those outside the model go by their place in the groups."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"group{g}.{i}")
    return names


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each rank has only a part of the optimizer's state. By name: the import costs a second."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{"state": {parameter: {key: value}}, "groups": [{option: value, "params": [parameter]}]}; nothing is copied."""
    names = _names(model, optimizer)
    return {
        "state": {names[parameter]: dict(values) for parameter, values in optimizer.state.items()},
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def steady_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What forwards and backwards leave alone: parameters and the optimizer's own state; buffers are not among it."""
    yield from model.parameters()
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def check_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Compare `saved` with the live optimizer, before anything is overwritten.

    Raises:
        JobFailedError: other parameters, groups or shapes; all differences are listed.
    """
    names = _names(model, optimizer)
    live = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    kept = [list(group["params"]) for group in saved["groups"]]
    if live != kept:
        flat_live, flat_kept = {n for group in live for n in group}, {n for group in kept for n in group}
        missing, extra = sorted(flat_live - flat_kept), sorted(flat_kept - flat_live)
        raise JobFailedError(
            "the checkpoint's optimizer does not fit this one: "
            f"missing {missing or 'none'}, extra {extra or 'none'}, groups of {[len(g) for g in kept]} parameters "
            f"instead of {[len(g) for g in live]}; build it as it was, or start in a new checkpoint directory"
        )
    shapes = {name: parameter.shape for parameter, name in names.items()}
    wrong = [
        f"{name}.{key} is {tuple(value.shape)} instead of {tuple(shapes[name])}"
        for name, values in saved["state"].items()
        for key, value in values.items()
        if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and value is not None and value.shape != shapes[name]
    ]
    if wrong:
        raise JobFailedError(f"the checkpoint's optimizer does not fit this one: {'; '.join(wrong)}")


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put `saved` into the optimizer with its own dtypes. The learning rates stay those of the program."""
    by_name = {name: parameter for parameter, name in _names(model, optimizer).items()}
    optimizer.state.clear()
    for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
        for option, value in kept.items():
            if option not in ("params", "lr", "initial_lr"):
                group[option] = value
    for name, values in saved["state"].items():
        parameter = by_name[name]
        stays_on_host = not any(
            group.get("capturable") or group.get("fused")
            for group in optimizer.param_groups
            if any(p is parameter for p in group["params"])
        )
        optimizer.state[parameter] = {
            key: _place(value, parameter, host=stays_on_host and key == "step") for key, value in values.items()
        }


def _place(value: Any, parameter: torch.Tensor, *, host: bool) -> Any:
    """A tensor on its parameter's device; step counters stay on the host where torch keeps them there."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and not host else value


def load_model_state(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Copy `saved` into the model. Names, shapes and dtypes were compared before."""
    model.load_state_dict(dict(saved), strict=True)
