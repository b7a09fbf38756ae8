"""Puts an agent together from a job's settings, runs it, and takes it apart again."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic.agent.agent import SIGNALS, Agent
from elastic.agent.assembly import highest_round, make_rendezvous
from elastic.agent.crew import Crew
from elastic.agent.ending import Farewell, say_how_it_ended
from elastic.agent.environment import job_command
from elastic.agent.give_back import note_membership
from elastic.agent.guard import Guard
from elastic.agent.instance import Instance
from elastic.agent.job_lock import JobLock
from elastic.agent.log_thread import log_thread
from elastic.agent.logs import make_logs_specs
from elastic.agent.mailbox import Mailbox
from elastic.agent.measuring import Measuring
from elastic.agent.memory import memory_folder, sweep
from elastic.agent.profiles import Profiles
from elastic.agent.rescuing import Finder, newest_round_in, note_owner
from elastic.agent.starting import Start, StoppedError
from elastic.agent.stop_timeout import own_unit, warn_if_short
from elastic.agent.systemd import Life, Notifier
from elastic.config import JobConfig
from elastic.errors import ElasticError, ExitCode, UsageError
from elastic.metrics.access import Access, exposure, load_access
from elastic.metrics.catalogue import Samples
from elastic.metrics.exposition import Exposition
from elastic.metrics.gpu import Gpus
from elastic.metrics.host import folder_bytes
from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from elastic.own_checkpoints import own_checkpoints
from elastic.rendezvous.handler import MembershipHandler
from elastic.runtime import runtime_dir, socket_path

logger = logging.getLogger(__name__)


def run_job(config: JobConfig) -> int:
    """Run the job on this node until it ends. Returns the exit code. Raises: ElasticError before it begins."""
    notifier = Notifier(os.environ)  # before anything is started that inherits the environment
    faulthandler.enable(2)  # systemd's watchdog ends us by SIGABRT: stacks go to the journal; sys.stderr may be None
    mailbox = Mailbox()
    mailbox.take_signals(SIGNALS)
    start = Start(mailbox, notifier, usr1_drains=config.usr1 == "drain", patience_seconds=config.join_timeout_seconds)
    with contextlib.closing(mailbox), contextlib.ExitStack() as stack:
        life = Life(runtime_dir(os.environ), supervised=notifier.is_listened_to)
        try:
            start.find_room(lambda: stack.enter_context(log_thread()))
            return _run(config, notifier, mailbox, start, life)
        except StoppedError as stop:
            notifier.ending(ExitCode.DRAINED)
            life.end(ExitCode.DRAINED)
            logger.info("%s", stop)
            return int(ExitCode.DRAINED)
        except ElasticError as exc:
            life.not_begun(exc.exit_code)
            raise


def _run(config: JobConfig, notifier: Notifier, mailbox: Mailbox, start: Start, life: Life) -> int:
    """Raises: StoppedError, ElasticError: before the agent's loop has begun."""
    farewell = Farewell()
    agent, held = start.find_room(lambda: _prepare(config, notifier, mailbox, start, life, farewell))
    with held:
        agent.run()
        ending = agent.ending()
        life.end(ending.exit_code)
        say_how_it_ended(ending, config)
        farewell.tell(ending)
        return int(ending.exit_code)


def _prepare(
    config: JobConfig, notifier: Notifier, mailbox: Mailbox, start: Start, life: Life, farewell: Farewell
) -> tuple[Agent, contextlib.ExitStack]:
    """The agent, and what is to be closed when it has run. Raises: as `_run`; OSError: there is no room for it."""
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(_instance())
        keep_open = stack.enter_context(_lock_checkpoints(config, instance, start))
        inheritance = sweep(Finder(config, pause=start.pause))
        memory, highest_kept = None, 0
        if config.memory_checkpoints:
            memory = stack.enter_context(memory_folder(inheritance=inheritance))
        if memory is not None:
            keep_open = (*keep_open, memory.descriptor)
            note_owner(memory.folder, config)
            highest_kept = newest_round_in(memory.folder, config.run_id)
        checkpoints = f"--checkpoint-dir {config.checkpoint_dir}"
        highest = start.reach(checkpoints, lambda: highest_round(config.checkpoint_dir))
        logs_specs = start.reach(
            f"--log-dir {config.log_dir}", lambda: make_logs_specs(config, instance.folder / "logs")
        )
        nonce = instance.nonce
        note_membership(instance.folder, config)
        if notifier.is_listened_to:
            warn_if_short(config, own_unit())
        access = load_access(config.http_token_file, config.http_cert, config.http_key)
        tcp = stack.enter_context(bind_tcp(config.http_host, config.http_port))
        first_number = 1 + max(highest, highest_kept)
        rendezvous = make_rendezvous(config, tcp.getsockname()[1], first_number=first_number, restarted=life.restarted)
        membership = stack.enter_context(contextlib.closing(rendezvous.membership))
        crew = Crew(
            config=config,
            logs_specs=logs_specs,
            mailbox=mailbox,
            folder=instance.folder,
            nonce=nonce,
            host=rendezvous.host,
            memory_dir=None if memory is None else str(memory.folder),
            keep_open=keep_open,
        )
        measuring = Measuring(config=config, crew=crew, mailbox=mailbox, store=rendezvous.meter.totals)
        stack.enter_context(contextlib.closing(measuring))
        agent = Agent(
            config=config,
            spec=_worker_spec(config, MembershipHandler(membership, run_id=config.run_id, backend=config.rdzv_backend)),
            crew=crew,
            membership=membership,
            mailbox=mailbox,
            guard=Guard(mailbox, nonce, keep_open),
            notifier=notifier,
            measuring=measuring,
        )
        gpus = stack.enter_context(contextlib.closing(Gpus()))
        shared = [instance.folder, *([memory.folder] if memory is not None else [])]
        metrics = Exposition(measuring.measure, [partial(_add_shared, shared), gpus.add_to])
        profiles = Profiles(crew=crew, mailbox=mailbox, log_dir=config.log_dir)
        site = Site(
            status=agent.status,
            healthy=agent.is_healthy,
            metrics=metrics.text,
            points=measuring.points,
            targets=measuring.targets,
            controls={"/profile": profiles.answer, "/drain": agent.orders.answer, "/end": farewell.answer},
        )
        server = StatusServer(tcp, socket_path(instance.folder.parent, os.getpid()), site, access)
        stack.enter_context(contextlib.closing(server))
        _say_where(config, server, access)
        return agent, stack.pop_all()


def _say_where(config: JobConfig, server: StatusServer, access: Access) -> None:
    """The first lines of the log: where to look, who else can, what NCCL is told."""
    host = f"[{config.http_host}]" if ":" in config.http_host else config.http_host
    url = f"{'http' if access.tls is None else 'https'}://{host}:{server.port}/status"
    logger.info("job %s on %s: status at %s", config.run_id, config.node_id, url)
    if risk := exposure(server.address, token=access.token is not None, tls=access.tls is not None):
        logger.warning("%s", risk)
    if config.checkpoint_dir is not None and config.checkpoint_every is None:
        logger.info(
            "no --checkpoint-every: unless the program has an interval of its own, the disk gets a checkpoint at the "
            "end, on a drain and on SIGUSR1"
        )
    if config.nccl:
        logger.info("NCCL: %s", ", ".join(f"{name}={value}" for name, value in config.nccl))


def _add_shared(folders: list[Path], samples: Samples) -> None:
    """The folders of this agent that lie in memory."""
    samples.add("memory_shared_bytes", folder_bytes(folders))


@contextlib.contextmanager
def _lock_checkpoints(config: JobConfig, instance: Instance, start: Start) -> Iterator[tuple[int, ...]]:
    """A job on one node has its checkpoints to itself, and so have the agents of one on many together.

    Yields what the warden is to hold as well. Raises: UsageError: another job has them, or nothing can reach them.
    StoppedError, StorageGoneError.
    """
    directory, runtime = config.checkpoint_dir, instance.folder.parent
    if directory is None:
        yield ()
        return
    if "://" in directory:
        try:
            own_checkpoints("storage").open_storage(directory)
        except own_checkpoints("errors").NoDriverError as exc:
            raise UsageError(f"--checkpoint-dir cannot be reached from here: {exc}") from exc
    run_id = None if config.rdzv_backend == "standalone" else config.run_id
    take = partial(JobLock, directory, runtime, run_id=run_id, pause=start.pause)
    with contextlib.closing(start.reach(f"--checkpoint-dir {directory}", take)) as lock:
        yield lock.descriptors


@contextlib.contextmanager
def _instance() -> Iterator[Instance]:
    instance = Instance(runtime_dir(os.environ))
    try:
        yield instance
    finally:
        instance.close()


def _worker_spec(config: JobConfig, handler: MembershipHandler) -> WorkerSpec:
    command = job_command(config)
    known = {field.name for field in dataclasses.fields(WorkerSpec)}  # by the torch that is here
    newer: dict[str, Any] = {"virtual_local_rank": config.virtual_local_rank}
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command.target,
        args=command.args,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        local_addr=config.local_addr,
        **{name: value for name, value in newer.items() if name in known},
    )
