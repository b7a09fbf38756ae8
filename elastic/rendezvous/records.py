"""The keys of a job in the store and what stands in them, but for the round: see `round.py`.

/elasticd/<run_id>/round                            the truth; no lease
/elasticd/<run_id>/nodes/<node_id>                  NodeRecord, under the node's lease
/elasticd/<run_id>/leader                           News, under the leader's lease
/elasticd/<run_id>/charges/<incarnation>/<round>    the failure's cause, under a lease of the restart window
/elasticd/<run_id>/preflight/...                    the same again, for nodes that only measure their network
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from elastic.rendezvous.identity import Identity
from elastic.rendezvous.membership import Waiting
from elastic.rendezvous.round import Node
from elastic.rendezvous.store import Entry

PROTOCOL = 1
PREFLIGHT = "preflight"  # <run_id>/preflight is a job of its own, below the prefix that the job's role may write
_SHOWN_WAITING = 32  # the news reach every node, so they stay short


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Where things are; all under one prefix that ends with a slash, so that `job` never sees `job2`."""

    run_id: str

    @property
    def prefix(self) -> str:
        return f"/elasticd/{self.run_id}/"

    @property
    def round(self) -> str:
        return f"{self.prefix}round"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def nodes(self) -> str:
        return f"{self.prefix}nodes/"

    def node(self, node_id: str) -> str:
        return f"{self.nodes}{node_id}"

    def charges(self, incarnation: str) -> str:
        return f"{self.prefix}charges/{incarnation}/"

    def charge(self, incarnation: str, number: int) -> str:
        return f"{self.charges(incarnation)}{number}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node's key: what it says of itself, and who wrote it."""

    node: Node
    identity: Identity
    version: str = ""
    protocol: int = PROTOCOL

    def to_json(self) -> str:
        fields: dict[str, Any] = {"node": _fields_of(self.node), "identity": _fields_of(self.identity)}
        fields |= {"version": self.version, "protocol": self.protocol}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> NodeRecord:
        """Keys that a newer version has added are ignored. Raises: ValueError when `text` is no such record."""
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(
                node=Node(**_known(Node, fields["node"])),
                identity=Identity(**_known(Identity, fields["identity"])),
                version=str(fields["version"]),
                protocol=int(fields["protocol"]),
            )
        except (TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise ValueError(f"not a node record: {text[:200]!r}") from exc


def node_of(entry: Entry) -> Node:
    """The node that has written its key. Raises: ValueError for what no node has."""
    node = NodeRecord.from_json(entry.value).node
    if node.node_id != entry.key.rpartition("/")[2]:
        raise ValueError(f"the record of node {node.node_id}")
    if not entry.lease:
        raise ValueError("it has no lease, and would stand for ever")
    return node


def nodes_of(entries: Iterable[Entry]) -> Iterator[Node]:
    """Those that can be read; others may be a newer version's."""
    for entry in entries:
        with contextlib.suppress(ValueError):
            yield node_of(entry)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What the leader tells everybody beside the round: why the next one is not there yet, and the budget."""

    node_id: str = ""
    incarnation: str = ""  # the one the leader has lived in
    settings: str = ""  # what a node must have to be let in
    used: int = 0  # of the restart budget
    short: str = ""  # fewer than MIN nodes: "1 of 2 nodes"
    waiting: tuple[Waiting, ...] = ()
    waiting_count: int = 0

    def to_json(self) -> str:
        fields = {name: value for name in _NEWS if (value := getattr(self, name))}
        fields["waiting"] = [(waiting.node_id, waiting.reason) for waiting in self.waiting[:_SHOWN_WAITING]]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> News:
        """Raises: ValueError when `text` is no such record."""
        try:
            fields: dict[str, Any] = json.loads(text)
            waiting = tuple(Waiting(node_id=i, reason=reason) for i, reason in fields.pop("waiting", ()))
            return cls(waiting=waiting, **_known(cls, fields))
        except (TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise ValueError(f"not the leader's news: {text[:200]!r}") from exc


_NEWS = [field.name for field in dataclasses.fields(News) if field.name != "waiting"]


def _fields_of(record: Node | Identity) -> dict[str, Any]:
    """Of values that have no fields themselves: a tenth of the time of `dataclasses.asdict`."""
    return {name: getattr(record, name) for name in _TYPES[type(record)]}


def _known(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Those that `cls` has. Raises: TypeError for one of another type."""
    types = _TYPES[cls]
    known = {name: value for name, value in fields.items() if name in types}
    for name, value in known.items():
        if type(value).__name__ != types[name]:
            raise TypeError(f"{name} is {value!r}")
    return known


_TYPES: dict[type, dict[str, str]] = {
    cls: {field.name: str(field.type) for field in dataclasses.fields(cls)} for cls in (Node, Identity, News)
}
