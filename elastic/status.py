"""What the job looks like from one agent, as frozen data: the language of `/status`, `elasticd status` and the agent.

`to_json` gives exactly the JSON that users script against; `from_json` takes it back and ignores keys it does not know,
so that an older `elasticd status` can read a newer agent. Times are unix seconds, durations seconds; None = not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

JobState = Literal["joining", "waiting", "spare", "starting", "running", "draining", "stopped", "closed"]
JobOutcome = Literal["succeeded", "failed", "drained"]
WorkerState = Literal["starting", "running", "draining", "finished", "drained", "failed", "stopped"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A member of the current round. `http` is HOST:PORT of its agent's page; empty: others do not reach it."""

    node_id: str
    node_rank: int
    addr: str
    ranks: tuple[int, ...] = ()
    http: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStatus:
    """A node that is not in the round, and why: "fewer than MIN", "more than MAX", "backing off" ..."""

    node_id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker of this node. `age_seconds` is the time since its last sign of progress.

    `standby`: a warm process waits to take its place. `slowdown` is its compute time for a micro-batch relative to the
    median of all ranks, as last compared.
    """

    local_rank: int
    rank: int | None = None
    pid: int | None = None
    state: WorkerState = "starting"
    step: int | None = None
    age_seconds: float | None = None
    slowdown: float | None = None
    standby: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartStatus:
    """The failure budget of the job: `used` of `limit` within the last `window_seconds`, which etcd does not know."""

    used: int = 0
    limit: int | None = None
    window_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """The newest step that is safe, by where it lies, and how many saves to disk have failed in a row since."""

    disk_step: int | None = None
    memory_step: int | None = None
    failed_saves: int = 0

    @property
    def warning(self) -> str:
        """What an operator is to see; empty while saves succeed."""
        return f"{plural(self.failed_saves, 'save')} failed since" if self.failed_saves else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureStatus:
    """The first failure that was not a mere consequence of another.

    `reason` is a short phrase ("exited", "killed", "out of memory", "hung", "lost"), `signal` a name such as "SIGKILL",
    `message` the exception's last line, `log` the last lines of the worker's output.
    """

    rank: int | None
    node_id: str
    reason: str
    exit_code: int | None = None
    signal: str | None = None
    message: str = ""
    log: str = ""

    @property
    def headline(self) -> str:
        """What happened, in a line: "killed by SIGKILL", "exited: ValueError: no such file"."""
        first = self.message.partition("\n")[0]
        return first if first.startswith(self.reason) else f"{self.reason}: {first}" if first else self.reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSeconds:
    """Where the time of a recovery went; the phases are disjoint and add up to `total` once the first step is done."""

    detect: float | None = None
    stop: float | None = None
    rendezvous: float | None = None
    start: float | None = None
    restore: float | None = None
    first_step: float | None = None
    total: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One interruption: what caused it, the round that it led to, and what it cost."""

    time: float
    cause: str
    round: int
    lost_steps: int | None = None
    seconds: IncidentSeconds = dataclasses.field(default_factory=IncidentSeconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The whole of `/status`."""

    run_id: str
    incarnation: str
    node_id: str
    state: JobState
    round: int = 0  # 0 = before the first one
    base_step: int | None = None
    world_size: int = 0
    outcome: JobOutcome | None = None
    nodes: tuple[NodeStatus, ...] = ()
    waiting: tuple[WaitingStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    restarts: RestartStatus = dataclasses.field(default_factory=RestartStatus)
    checkpoint: CheckpointStatus = dataclasses.field(default_factory=CheckpointStatus)
    last_failure: FailureStatus | None = None
    incidents: tuple[Incident, ...] = ()
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variables of the workers
    cause: str = ""  # what the round answers, or what ended it

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, in the order of the fields."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> JobStatus:
        """The inverse of `to_json`.

        Raises: ValueError when a field is missing or a part has the wrong shape.
        """
        try:
            parts: dict[str, Any] = {
                "nodes": tuple(_build(NodeStatus, {**n, "ranks": tuple(n["ranks"])}) for n in raw["nodes"]),
                "waiting": tuple(_build(WaitingStatus, w) for w in raw["waiting"]),
                "workers": tuple(_build(WorkerStatus, w) for w in raw["workers"]),
                "restarts": _build(RestartStatus, raw["restarts"]),
                "checkpoint": _build(CheckpointStatus, raw["checkpoint"]),
                "last_failure": None if raw["last_failure"] is None else _build(FailureStatus, raw["last_failure"]),
                "incidents": tuple(
                    _build(Incident, {**i, "seconds": _build(IncidentSeconds, i["seconds"])}) for i in raw["incidents"]
                ),
            }
            return _build(cls, {**raw, **parts})
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a job status: {type(exc).__name__}: {exc}") from exc


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _plain(value: Any) -> Any:
    """The same with lists for tuples, as JSON would give it back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _build(cls: type[T], raw: Mapping[str, Any]) -> T:
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # T is one of the above
    return cls(**{key: value for key, value in raw.items() if key in known})
