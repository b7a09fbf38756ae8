"""The whole job as the store has it, for who looks from outside: one read, nothing is written."""

from __future__ import annotations

from elastic.errors import UsageError
from elastic.rendezvous.records import PREFLIGHT, Keys, News, nodes_of
from elastic.rendezvous.round import Node, Phase, Round
from elastic.rendezvous.store import Store
from elastic.status import JobOutcome, JobState, JobStatus, NodeStatus, RestartStatus, WaitingStatus

_STATES: dict[Phase, JobState] = {
    Phase.RUNNING: "running",
    Phase.DRAINING: "draining",
    Phase.BROKEN: "joining",
    Phase.CLOSED: "closed",
}


def job_overview(store: Store, run_id: str) -> JobStatus:
    """What the store knows of the job; workers, steps and incidents are known to each agent alone.

    Raises: UsageError when there is no such job.
    """
    keys = Keys(run_id)
    entries = store.read(keys.prefix, prefix=True).entries
    entries = {key: entry for key, entry in entries.items() if not key.startswith(f"{keys.prefix}{PREFLIGHT}/")}
    if not entries:
        raise UsageError(f"there is no job {run_id!r} in this etcd: check --rdzv-id and --rdzv-endpoint")
    try:
        current = Round.from_json(entries[keys.round].value) if keys.round in entries else None
        news = News.from_json(entries[keys.leader].value) if keys.leader in entries else News()
    except ValueError as exc:
        raise UsageError(f"what etcd holds of job {run_id} cannot be read, by this elasticd at least: {exc}") from exc
    nodes = {node.node_id: node for node in nodes_of(e for e in entries.values() if e.key.startswith(keys.nodes))}
    return JobStatus(
        run_id=run_id,
        incarnation=current.incarnation if current else "",
        node_id="",
        state=_state(current, nodes),
        round=current.number if current else 0,
        cause=current.cause if current else "",
        world_size=current.world_size if current else 0,
        outcome=_outcome(current),
        nodes=_members(current, nodes),
        waiting=tuple(WaitingStatus(node_id=w.node_id, reason=w.reason) for w in news.waiting),
        restarts=RestartStatus(used=news.used),
    )


def _state(current: Round | None, nodes: dict[str, Node]) -> JobState:
    if current is None:
        return "joining"
    if current.phase is Phase.CLOSED:
        return "closed"
    if not any(member.node_id in nodes for member in current.members):
        return "waiting" if nodes else "stopped"
    return _STATES[current.phase]


def _outcome(current: Round | None) -> JobOutcome | None:
    if current is None or current.phase is not Phase.CLOSED:
        return None
    return "succeeded" if current.outcome == "succeeded" else "failed"


def _members(current: Round | None, nodes: dict[str, Node]) -> tuple[NodeStatus, ...]:
    if current is None:
        return ()
    return tuple(
        NodeStatus(
            node_id=member.node_id,
            node_rank=rank,
            addr=nodes[member.node_id].addr if member.node_id in nodes else "",
            http=nodes[member.node_id].http if member.node_id in nodes else "",
            ranks=tuple(current.ranks(member.node_id)),
        )
        for rank, member in enumerate(current.members)
    )
