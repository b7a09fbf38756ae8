"""The agent's state as the frozen `JobStatus`: built by its loop, served to others by its HTTP threads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from elastic.agent.workers import Worker
from elastic.config import JobConfig
from elastic.errors import ExitCode
from elastic.progress import Outcome, Progress
from elastic.rendezvous.membership import View
from elastic.rendezvous.round import Phase, Round
from elastic.status import (
    CheckpointStatus,
    FailureStatus,
    Incident,
    JobOutcome,
    JobState,
    JobStatus,
    NodeStatus,
    RestartStatus,
    WaitingStatus,
    WorkerState,
    WorkerStatus,
    plural,
)

STORE_AWAY = "etcd has not answered for most of the lease"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the status is made of."""

    config: JobConfig
    view: View
    workers: Sequence[Worker]
    standbys: frozenset[int]  # local ranks that a warm one waits for
    draining: bool
    joining: bool
    finished: JobOutcome | None
    checkpoint: CheckpointStatus
    last_failure: FailureStatus | None
    incidents: tuple[Incident, ...]


def job_status(facts: Facts) -> JobStatus:
    """The whole of `/status`."""
    formed, config, view = facts.view.round, facts.config, facts.view
    return JobStatus(
        run_id=config.run_id,
        incarnation=view.incarnation,
        node_id=view.node_id or config.node_id,
        state=job_state(facts),
        round=formed.number if formed else 0,
        cause=formed.cause if formed else "",
        base_step=next((w.progress.base_step for w in facts.workers if w.progress.in_loop), None),
        world_size=formed.world_size if formed else 0,
        outcome=facts.finished,
        nodes=_nodes(formed, view),
        waiting=tuple(WaitingStatus(node_id=w.node_id, reason=w.reason) for w in view.waiting),
        workers=tuple(_worker(w, facts) for w in facts.workers),
        restarts=RestartStatus(
            used=view.restarts_used, limit=view.restarts_limit, window_seconds=view.restart_window_seconds
        ),
        checkpoint=facts.checkpoint,
        last_failure=facts.last_failure,
        incidents=facts.incidents,
        nccl=dict(config.nccl),
    )


def job_state(facts: Facts) -> JobState:
    """One word for where this agent is."""
    formed = facts.view.round
    if facts.finished is not None or (formed is not None and formed.phase is Phase.CLOSED):
        return "closed"
    alive = [worker for worker in facts.workers if worker.is_alive]
    if alive:
        if facts.draining:
            return "draining"
        return "running" if all(_is_running(worker) for worker in facts.workers) else "starting"
    if facts.view.is_spare:
        return "spare"
    if facts.view.waiting:
        return "waiting"
    return "joining" if facts.joining or formed is None else "stopped"


def _is_running(worker: Worker) -> bool:
    return not worker.is_alive or worker.counts_as_running


def _nodes(formed: Round | None, view: View) -> tuple[NodeStatus, ...]:
    if formed is None:
        return ()
    known = {node.node_id: node for node in view.nodes}
    return tuple(
        NodeStatus(
            node_id=member.node_id,
            node_rank=rank,
            addr=known[member.node_id].addr if member.node_id in known else "",
            ranks=tuple(formed.ranks(member.node_id)),
            http=known[member.node_id].http if member.node_id in known else "",
        )
        for rank, member in enumerate(formed.members)
    )


def _worker(worker: Worker, facts: Facts) -> WorkerStatus:
    report = worker.progress
    return WorkerStatus(
        local_rank=worker.plan.local_rank,
        rank=worker.plan.rank,
        pid=worker.pid,
        state=_worker_state(worker, report, draining=facts.draining),
        step=_known(report.step),
        age_seconds=round(time.monotonic() - sign, 3) if (sign := report.progressed_at or report.heartbeat) else None,
        slowdown=round(report.slowdown, 2) if report.slowdown else None,
        standby=worker.plan.local_rank in facts.standbys,
    )


def _worker_state(worker: Worker, report: Progress, *, draining: bool) -> WorkerState:
    if worker.is_alive:
        if draining:
            return "draining"
        return "running" if _is_running(worker) else "starting"
    if worker.exit_code == 0:
        return "drained" if report.outcome == Outcome.DRAINED else "finished"
    return "stopped" if worker.stopped_by_us else "failed"


def _known(step: int) -> int | None:
    return step if step >= 0 else None


def headline(status: JobStatus) -> str:
    """One line for `systemctl status`: state, round, world size, step, why it waits, the last failure."""
    parts = [f"{status.state}: {plural(status.world_size, 'rank')} on {plural(len(status.nodes), 'node')}"]
    if status.round:
        parts.append(f"round {status.round}")
    steps = [worker.step for worker in status.workers if worker.step is not None]
    if steps:
        parts.append(f"step {max(steps)}")
    if status.checkpoint.disk_step is not None:
        parts.append(f"committed {status.checkpoint.disk_step}")
    if status.checkpoint.warning:
        parts.append(status.checkpoint.warning)
    parts += [f"{node.node_id} waits: {node.reason}" for node in status.waiting]
    if (failure := status.last_failure) is not None:
        who = failure.node_id if failure.rank is None else f"rank {failure.rank}"
        parts.append(f"last failure: {who} {failure.headline}")
    return ", ".join(parts)


def why_draining(view: View, *, asked: bool) -> str:
    """For the log. `asked`: by a signal to this agent."""
    if asked:
        return "asked to stop"
    if view.drain_wanted:
        return STORE_AWAY
    return view.round.cause if view.round is not None else ""


def closed_with(view: View) -> ExitCode | None:
    """How the job has ended, for members and spares alike."""
    if view.outcome == "succeeded":
        return ExitCode.SUCCEEDED
    if view.outcome == "failed":
        return ExitCode(view.exit_code or ExitCode.FAILED)
    return None
