"""JSON that may be damaged or foreign -> values of exactly the declared types, or ValueError and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
LARGEST = 2**63 - 1
DEEPEST = 256  # a state of the deepest kind that can be saved takes about 200


def loads(data: bytes) -> Any:
    """Parse JSON without NaN, infinities and depths that later code could not follow.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    level = [value]
    for _ in range(DEEPEST):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def build(kind: type[T], value: Any, where: str = "") -> T:
    """The dataclass `kind` from a JSON object with its fields; others are passed over.

    Raises:
        ValueError: names the field that is missing or of another type. Integers are never negative here.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is no object but {value!r:.60}")
    declared: Any = kind  # T cannot be bound to dataclasses
    hints = _hints(declared)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(declared):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            fields[field.name] = convert(hints[field.name], value[field.name], path)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**fields)


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`: Any, str, int, float, X | None, tuple[..] or a dataclass. Raises as `build` does."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else convert(arguments[0], value, where)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, where)
    if hint is not Any and not _is_plain(hint, value):
        raise ValueError(f"{where} is {value!r:.60}, which is no valid {hint.__name__}")
    return value


def _is_plain(hint: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if hint is int:
        return isinstance(value, int) and 0 <= value <= LARGEST
    if hint is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST)
    return isinstance(value, hint)


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is no list but {value!r:.60}")
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise ValueError(f"{where} has {len(value)} items instead of {len(items)}")
    return tuple(
        convert(item, entry, f"{where}[{i}]") for i, (item, entry) in enumerate(zip(items, value, strict=True))
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _children(item: Any) -> Any:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text:.40}, which is no finite number")
    return value
