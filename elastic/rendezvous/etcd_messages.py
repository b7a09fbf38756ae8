"""etcd3's messages for whichever protobuf there is.

etcd3 0.12 ships code that protoc wrote in 2018. Protobuf 4 and later refuse it, except in their pure Python
implementation, which is chosen once for a whole process and takes ten times as long. But that code has the descriptors
in it as well, as every protobuf reads them: the messages are made of those, in a pool of their own, for `rpc.proto` is
a name that others have too. The way of a newer protoc's code: <https://protobuf.dev/reference/python/python-generated>
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import sys
import warnings
from types import ModuleType
from typing import Any

_PACKAGE = "etcd3.etcdrpc"
_MODULES = ("kv_pb2", "auth_pb2", "rpc_pb2")  # each may use those before it
_SERIALIZED = re.compile(r"\bserialized_pb=_b\(('(?:[^'\\\n]|\\.)*')\)")


def load() -> tuple[Any, Any]:
    """The packages etcd3 and etcd3.etcdrpc, imported. An etcd3 that brings newer code keeps that.

    Raises: ImportError without etcd3 or what it needs.
    """
    if _PACKAGE not in sys.modules:
        _provide()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of six: nothing a user could change
        import etcd3
        from etcd3 import etcdrpc
    for name in _MODULES:
        setattr(etcdrpc, name, sys.modules[f"{_PACKAGE}.{name}"])
    return etcd3, etcdrpc


def _provide() -> None:
    """Puts the message modules where an import finds them."""
    found = [_SERIALIZED.search(source) for source in _sources()]
    if not all(found):
        return
    from google.protobuf import descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    for name, match in zip(_MODULES, found, strict=True):
        assert match is not None
        serialized = ast.literal_eval(match[1]).encode("latin1")
        sys.modules[f"{_PACKAGE}.{name}"] = _module(f"{_PACKAGE}.{name}", pool, serialized)


def _sources() -> list[str]:
    """The text of the three modules, which are not run."""
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'etcd3'", name="etcd3")
    folder = pathlib.Path(spec.submodule_search_locations[0], "etcdrpc")
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES]


def _module(name: str, pool: Any, serialized: bytes) -> ModuleType:
    """A module with the messages and enumerations of one file, under the names that protoc gives them."""
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.internal import enum_type_wrapper

    # The name before protobuf 4.22 for the same.
    message_class = getattr(message_factory, "GetMessageClass", None) or message_factory.MessageFactory().GetPrototype
    pool.AddSerializedFile(serialized)
    descriptor = pool.FindFileByName(descriptor_pb2.FileDescriptorProto.FromString(serialized).name)
    module: Any = ModuleType(name)
    module.DESCRIPTOR = descriptor
    for title, message in descriptor.message_types_by_name.items():
        setattr(module, title, message_class(message))
    for title, enum in descriptor.enum_types_by_name.items():
        setattr(module, title, enum_type_wrapper.EnumTypeWrapper(enum))
        for value in enum.values:
            setattr(module, value.name, value.number)
    return module  # type: ignore[no-any-return]
