"""`elasticd status` and `elasticd drain`: asks the agents of this host and puts their answers into words."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping

from elastic.cli_table import brief, shown, table
from elastic.errors import ExitCode, UsageError
from elastic.metrics import client
from elastic.metrics.client import FoundAgent
from elastic.status import FailureStatus, JobStatus

_REFRESH_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_LINE_CHARACTERS, _CELL_CHARACTERS = 110, 60  # of a cause; --json has it whole


def show_status(environ: Mapping[str, str], options: argparse.Namespace) -> int:
    """Returns the exit code: 1 when there is no agent to ask."""

    def find() -> list[FoundAgent]:
        return _found(environ, options.run_id, options.pid)

    agents = find()
    if not agents:
        print(_none_found(options.run_id, options.pid), file=sys.stderr)
        return int(ExitCode.FAILED)
    if options.watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(find, agents, options.json)
    else:
        print(_as_json(agents) if options.json else _as_text(agents))
    return int(ExitCode.SUCCEEDED)


def show_job(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The whole job, from etcd. Raises: UsageError, StoreUnavailableError."""
    if not options.run_id:
        raise UsageError("--rdzv-endpoint says which etcd; --rdzv-id is missing: which job in it")
    from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
    from elastic.rendezvous.etcd_store import open_store
    from elastic.rendezvous.overview import job_overview

    config = EtcdConfig(
        endpoints=parse_endpoints(options.rdzv_endpoint),
        ca=options.etcd_ca,
        cert=options.etcd_cert,
        key=options.etcd_key,
        user=options.etcd_user,
        password=environ.get("ELASTICD_ETCD_PASSWORD"),
    )
    with contextlib.closing(open_store(config)) as store:
        while True:
            status = job_overview(store, options.run_id)
            print(json.dumps(status.to_json()) if options.json else render(status, None), flush=True)
            if not options.watch:
                return int(ExitCode.SUCCEEDED)
            time.sleep(_REFRESH_SECONDS)


def drain_agent(environ: Mapping[str, str], *, run_id: str | None, pid: int | None, wait: bool) -> int:
    """Have the one agent that is meant save and stop; asked again it says how far it is.

    `wait`: until its process has ended; returns its exit code then, 0 for one that has drained.
    Raises: UsageError when it is not clear who is meant.
    """
    agent = the_agent(environ, run_id=run_id, pid=pid)
    if agent is None:
        return int(ExitCode.FAILED)
    draining = client.drain(agent)
    bound = "" if draining.seconds is None else f", which may take up to {math.ceil(draining.seconds)} s"
    if draining.already:
        print(f"agent {agent.pid} of job {agent.status.run_id} drains already{bound}", flush=True)
    else:
        print(f"asked agent {agent.pid} of job {agent.status.run_id} to drain{bound}", flush=True)
    return _wait_for_end(agent) if wait else int(ExitCode.SUCCEEDED)


def _wait_for_end(agent: FoundAgent) -> int:
    """Until its process is gone, however long that takes; says how it has ended, and returns that."""
    from elastic.rendezvous.identity import start_time

    last, began = agent.status, start_time(agent.pid)
    ended = client.wait_for_end(agent)
    while began is not None and start_time(agent.pid) == began:  # another one may get its pid
        last = client.ask(agent) or last
        time.sleep(_LOOK_SECONDS)
    if ended is None:
        newest = shown(last.checkpoint.disk_step)
        print(f"it has ended without a word, its log says how; newest committed step it told of: {newest}")
        return int(ExitCode.FAILED)
    step, newest = (shown(None if number < 0 else number) for number in (ended.step, ended.committed_step))
    print(f"it has ended with exit code {ended.exit_code} at step {step}; newest committed step: {newest}")
    return 0 if ended.exit_code in (ExitCode.SUCCEEDED, ExitCode.DRAINED) else ended.exit_code


def the_agent(environ: Mapping[str, str], *, run_id: str | None, pid: int | None) -> FoundAgent | None:
    """The one that is meant; None when there is none, which is then said. Raises: UsageError for more than one."""
    agents = _found(environ, run_id, pid)
    if not agents:
        print(_none_found(run_id, pid), file=sys.stderr)
        return None
    if len(agents) > 1:
        nodes = [f"pid {agent.pid}: node {agent.status.node_id} of job {agent.status.run_id}" for agent in agents]
        by = "--rdzv-id or --pid" if len({agent.status.run_id for agent in agents}) > 1 else "--pid"
        raise UsageError(f"several agents on this host, choose one by {by}: {'; '.join(nodes)}")
    return agents[0]


def _found(environ: Mapping[str, str], run_id: str | None, pid: int | None) -> list[FoundAgent]:
    return [agent for agent in client.find_agents(environ, run_id) if pid in (None, agent.pid)]


def _none_found(run_id: str | None, pid: int | None = None) -> str:
    which = (f" of job {run_id}" if run_id else "") + (f" with pid {pid}" if pid is not None else "")
    return f"elasticd: no running agent{which} on this host"


def _watch(find: Callable[[], list[FoundAgent]], agents: list[FoundAgent], as_json: bool) -> None:
    """In place on a terminal, one after another elsewhere; until interrupted or the last agent has ended."""
    if as_json or not sys.stdout.isatty():
        while agents:
            print(_as_json(agents) if as_json else _as_text(agents) + "\n", flush=True)
            time.sleep(_REFRESH_SECONDS)
            agents = find()
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text(_as_text(agents)), auto_refresh=False) as live:
        while agents:
            live.update(Text(_as_text(agents)), refresh=True)
            time.sleep(_REFRESH_SECONDS)
            agents = find()
    print("the last agent has ended")


def _as_json(agents: list[FoundAgent]) -> str:
    found = [agent.status.to_json() for agent in agents]
    return json.dumps(found[0] if len(found) == 1 else found)


def _as_text(agents: list[FoundAgent]) -> str:
    return "\n\n".join(render(agent.status, agent.pid) for agent in agents)


def render(status: JobStatus, pid: int | None) -> str:
    """One agent's view for people; without a pid the whole job's, as etcd has it."""
    outcome = f" ({status.outcome})" if status.outcome else ""
    begin = "" if status.base_step is None else f", from step {status.base_step}"  # which etcd does not know
    lines = [
        f"job {status.run_id}: {status.state}{outcome}, round {status.round}, world size {status.world_size}{begin}",
    ]
    if status.cause:
        lines += [f"round {status.round}: {brief(status.cause, _LINE_CHARACTERS)}"]
    if pid is None:
        lines += [f"incarnation {status.incarnation}, restarts used: {status.restarts.used}"]
        pages = "".join(f", {node.node_id} http://{node.http}/" for node in status.nodes if node.http)
        lines += [f"steps, failures and incidents: `elasticd status` on a node, or its page{pages}"]
    else:
        lines += [
            f"node {status.node_id}, agent pid {pid}, incarnation {status.incarnation}",
            f"restarts {status.restarts.used} of {shown(status.restarts.limit)} "
            f"in {status.restarts.window_seconds or 0:g} s; "
            f"newest committed step: {shown(status.checkpoint.disk_step)}",
        ]
        if status.checkpoint.warning:
            lines += [f"{status.checkpoint.warning}: the workers' logs say why"]
    if status.nccl:
        lines += ["nccl: " + ", ".join(f"{name}={value}" for name, value in status.nccl.items())]
    if status.nodes:
        rows = [(n.node_rank, n.node_id, n.addr, ",".join(map(str, n.ranks))) for n in status.nodes]
        lines += ["", table(("node rank", "node", "address", "ranks"), rows)]
    if status.waiting:
        lines += ["", table(("waiting node", "reason"), [(w.node_id, w.reason) for w in status.waiting])]
    if status.workers:
        workers = [
            (w.local_rank, w.rank, w.pid, w.state, w.step, w.age_seconds, w.slowdown, "warm" if w.standby else None)
            for w in status.workers
        ]
        lines += ["", table(("local rank", "rank", "pid", "state", "step", "age s", "slowdown", "standby"), workers)]
    if status.incidents:
        lines += ["", _render_incidents(status)]
    if status.last_failure is not None:
        lines += ["", _render_failure(status.last_failure)]
    return "\n".join(lines)


def _render_failure(failure: FailureStatus) -> str:
    who = f"rank {failure.rank} on {failure.node_id}" if failure.rank is not None else failure.node_id
    how = failure.signal or (f"exit code {failure.exit_code}" if failure.exit_code is not None else "")
    head = f"last failure: {who} {failure.reason}" + (f" ({how})" if how else "")
    text = [part for part in (failure.message.strip(), failure.log.strip()) if part]
    return "\n".join([head, *("  " + line for part in text for line in part.splitlines())])


def _render_incidents(status: JobStatus) -> str:
    phases = ("detect", "stop", "rendezvous", "start", "restore", "first_step", "total")
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.time)),
            brief(incident.cause, _CELL_CHARACTERS),
            incident.round or None,  # not decided yet
            incident.lost_steps,
            *(getattr(incident.seconds, phase) for phase in phases),
        )
        for incident in status.incidents
    ]
    return table(("time", "incident", "round", "lost steps", *(phase.replace("_", " ") for phase in phases)), rows)
