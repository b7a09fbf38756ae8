"""`elasticd profile`: asks an agent for a profile of the next steps, waits for it and shows where the time went."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.cli_status import the_agent
from elastic.cli_table import table
from elastic.errors import ElasticError, ExitCode
from elastic.metrics import client
from elastic.metrics.client import FoundAgent
from elastic.profile_order import PARTS, ProfileOrder, ProfileSummary
from elastic.status import JobStatus

_LOOK_SECONDS = 0.1
_ASK_SECONDS = 1.0
_IGNORED_STEPS = 100  # so many steps after the last one that was asked for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the agent has ordered."""

    order: ProfileOrder
    round: int
    ranks: tuple[int, ...]
    step: int  # of the workers, before it was ordered


def profile(
    environ: Mapping[str, str], *, which: tuple[str | None, int | None], steps: int, out: Path | None, as_json: bool
) -> int:
    """`which`: run id and pid of the agent. Raises: ElasticError, which says what to do instead."""
    run_id, pid = which
    agent = the_agent(environ, run_id=run_id, pid=pid)
    if agent is None:
        return int(ExitCode.FAILED)
    wanted = _order(agent, steps, out)
    _wait(agent, wanted)
    summaries = [_summary(wanted.order, rank) for rank in wanted.ranks]
    print(json.dumps(_plain(wanted, summaries)) if as_json else _words(wanted, summaries))
    return int(ExitCode.SUCCEEDED)


def _order(agent: FoundAgent, steps: int, out: Path | None) -> _Wanted:
    arguments = {"steps": str(steps), **({"out": str(out.absolute())} if out is not None else {})}
    code, text = client.command(agent, "/profile", arguments)
    if code != 200:
        raise ElasticError(text.strip())
    told = json.loads(text)
    return _Wanted(
        order=ProfileOrder.from_json(told["order"]),
        round=told["round"],
        ranks=tuple(told["ranks"]),
        step=_step(agent.status),
    )


def _wait(agent: FoundAgent, wanted: _Wanted) -> None:
    """Until every rank has left its summary. Raises: ElasticError when that is not going to happen."""
    asked_at = time.monotonic()
    while not all(wanted.order.summary(rank).exists() for rank in wanted.ranks):
        time.sleep(_LOOK_SECONDS)
        if time.monotonic() - asked_at < _ASK_SECONDS:
            continue
        asked_at = time.monotonic()
        status = client.ask(agent)
        if all(wanted.order.summary(rank).exists() for rank in wanted.ranks):
            return  # the job may have ended right after it
        if status is None:
            raise ElasticError(f"agent {agent.pid} is gone, and the profile with it")
        if status.round != wanted.round or status.state not in ("running", "starting"):
            raise ElasticError(
                f"round {wanted.round} has ended before {wanted.order.steps} steps were profiled "
                f"(now: {status.state}, round {status.round}); ask again"
            )
        if _step(status) > wanted.step + wanted.order.steps + _IGNORED_STEPS:
            raise ElasticError(
                "the workers go on and do not profile: their loop must call session.agree() and session.report() each "
                "step, as the Trainer does, and their log says if something cannot be written"
            )


def _step(status: JobStatus) -> int:
    return max((worker.step for worker in status.workers if worker.step is not None), default=-1)


def _summary(order: ProfileOrder, rank: int) -> ProfileSummary:
    path = order.summary(rank)
    with contextlib.suppress(OSError, ValueError):
        return ProfileSummary.from_json(json.loads(path.read_text()))
    raise ElasticError(f"{path} cannot be read: is it another user's?")


def _plain(wanted: _Wanted, summaries: Sequence[ProfileSummary]) -> dict[str, Any]:
    return {
        "profile": wanted.order.name,
        "folder": wanted.order.folder,
        "round": wanted.round,
        "ranks": [summary.to_json() for summary in summaries],
    }


def _words(wanted: _Wanted, summaries: Sequence[ProfileSummary]) -> str:
    first = summaries[0]
    rows = [
        (summary.rank, summary.step_seconds, *(summary.seconds.get(part) for part in PARTS)) for summary in summaries
    ]
    headers = ("rank", "step s", *(part.replace("_", " ") for part in PARTS))
    lines = [
        f"steps {first.first_step} to {first.last_step} of round {wanted.round}; seconds, with the profiler's cost:",
        "",
        table(headers, rows),
        "",
    ]
    if not all(summary.seconds for summary in summaries):
        lines.append("a loop that enters no phases (session.phase) does not say where its time goes; its trace does")
    lines.append("traces, for chrome://tracing or ui.perfetto.dev:")
    return "\n".join([*lines, *(f"  {summary.trace}" for summary in summaries)])
