"""This node's side of a round: its store server, workers, logs and what has been done to them so far."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import signal
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # what torch.distributed exports, with its types
from torch.distributed.elastic.multiprocessing import LogsSpecs

from elastic.agent import failure as failures
from elastic.agent.decide import WorkerView
from elastic.agent.environment import births, worker_environ
from elastic.agent.hang import Verdict
from elastic.agent.leftovers import kill_below, kill_round
from elastic.agent.logs import Console
from elastic.agent.mailbox import Mailbox
from elastic.agent.oom import oom_kills
from elastic.agent.standbys import Standbys
from elastic.agent.warden import kill_everything
from elastic.agent.workers import Worker, WorkerPlan, Workers
from elastic.config import JobConfig
from elastic.errors import UsageError
from elastic.passing import lacks_room
from elastic.progress import Outcome, Progress
from elastic.rendezvous.round import Round
from elastic.status import CheckpointStatus, FailureStatus

logger = logging.getLogger(__name__)

_STACKS_SECONDS = 0.3  # for hung workers to write their stacks
_SETTLE_SECONDS = 1.0  # for the real cause to show after a communication error
_SETTLED_SECONDS = 10.0  # a script without a session that ran this long has got somewhere
_SWEEP_SECONDS = 2.0
_COLD_UP_SECONDS, _WARM_UP_SECONDS = 5.0, 2.0  # a script without a session has begun by then, we suppose
_SILENT_LOOP_SECONDS = 60.0  # one with a session that does not report steps


@dataclasses.dataclass(slots=True, kw_only=True)
class RoundActs:
    """What has been done to the workers of the current round; CLOCK_MONOTONIC deadlines, None = not begun."""

    announced: bool = False
    killed: bool = False
    frozen: bool = False
    hung: Verdict | None = None
    stacks_until: float | None = None  # they write their stacks
    settling_until: float | None = None
    drain_until: float | None = None
    terminate_until: float | None = None


class Crew:
    """The workers of one round after another, and the steps they have reached."""

    def __init__(
        self,
        *,
        config: JobConfig,
        logs_specs: LogsSpecs,
        mailbox: Mailbox,
        folder: Path,
        nonce: str,
        host: str = "",
        memory_dir: str | None = None,
        keep_open: tuple[int, ...] = (),
    ) -> None:
        """`host`: the address that peers reach this node by; empty: there are none, and loopback will do.

        `memory_dir`: the agent's folder in shared memory, for the workers' checkpoints. `keep_open`: descriptors of
        locks, which hold as long as a worker lives, whatever becomes of the agent.
        """
        self._config = config
        self._logs_specs = logs_specs
        self._folder = folder
        self._nonce = nonce
        self._host, self.memory_dir = host, memory_dir
        self._births = births(config, nonce, keep_open)
        self._wants_standbys = config.standby and not config.no_python
        self._console = Console(config)
        self._store: TCPStore | None = None  # of the round whose workers are or were here
        self._next_store: TCPStore | None = None  # for the round to come, if this node is to host it
        self._oom_kills = 0
        self.workers = Workers(mailbox)
        self.standbys = Standbys(mailbox, config.preload)
        self._next_address: tuple[str, int] = ("", 0)
        self.master: tuple[str, int] = ("", 0)
        self.round = 0
        self.has_rank_0 = False  # of the last round that ran here
        self._node_id = config.node_id
        self.done = RoundActs()
        self.applied_step = -1  # of the newest round that reported one
        self.disk_step = -1  # newest ever committed
        self.memory_step = -1  # newest that every rank of this node has in memory
        self._unsaved_since: float | None = None  # unix time: of the newest commit, or when training began
        self._record_step = -1  # the highest step applied by the rounds before this one

    def read_progress(self) -> None:
        """Take the newest reports into the steps kept here."""
        reports = [worker.progress for worker in self.workers.all]
        if in_loop := [report.step for report in reports if report.in_loop]:
            self.applied_step = max(in_loop)
            committed = max(report.commit_unix_time for report in reports)
            self._unsaved_since = max(self._unsaved_since or time.time(), committed)
        self.disk_step = max([self.disk_step, *(report.disk_step for report in reports)])
        self.memory_step = kept_step(reports, self.memory_step)

    @property
    def safe(self) -> CheckpointStatus:
        """What is safe of what was read last."""
        reports = [worker.progress for worker in self.workers.all]
        known = [step if step >= 0 else None for step in (self.disk_step, self.memory_step)]
        failed = max([report.failed_saves for report in reports], default=0)
        return CheckpointStatus(disk_step=known[0], memory_step=known[1], failed_saves=failed)

    @property
    def has_progressed(self) -> bool:
        """Whether this round has applied a step that none before it had; without a session, whether it ran for long."""
        reports = [worker.progress for worker in self.workers.all]
        if any(report.pid for report in reports):
            return max(report.step for report in reports) > self._record_step
        return bool(self.workers.all) and time.monotonic() - self.workers.all[0].started_at > _SETTLED_SECONDS

    @property
    def failed(self) -> list[Worker]:
        return [worker for worker in self.workers.all if worker_view(worker).has_failed]

    def views(self) -> tuple[WorkerView, ...]:
        return tuple(worker_view(worker) for worker in self.workers.all)

    # Acts.

    def open_store(self) -> int:
        """A fresh server for the round to come; an old one would hand the last round's keys to the new workers.

        The last round's stays open until then: peers may still have workers of it. Returns the new one's port.

        Raises:
            UsageError: --master-addr or --master-port cannot be had.
            OSError: this host has no room for it now: no thread, no descriptor, no memory, no port.
        """
        if self._next_store is not None:
            return self._next_address[1]
        if self._config.master_port:
            self._store = None  # both would want the same port
        listener = _listen(self._host or self._config.master_addr or "", self._config.master_port or 0)
        self._next_address = listener.getsockname()[:2]
        try:
            self._next_store = TCPStore(
                self._next_address[0],
                self._next_address[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
                master_listen_fd=listener.detach(),
            )
        except RuntimeError as exc:  # which torch makes of every cause; the address is ours already
            raise OSError(errno.EAGAIN, str(exc).partition("\n")[0]) from exc
        return self._next_address[1]

    def start(self, formed: Round, node_id: str) -> None:
        """Start this node's workers of the round. Raises: OSError when a process cannot be started."""
        previous, self.round, self._node_id = self.round, formed.number, node_id
        self.has_rank_0 = 0 in formed.ranks(node_id)
        hosts = formed.store_host == node_id
        self.master = self._next_address if hosts else (formed.store_addr, formed.store_port)
        self._store, self._next_store = (self._next_store if hosts else None), None
        self.done = RoundActs()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a logout or a cleaner of /tmp may have removed it
        self._record_step = max(self._record_step, self.applied_step)
        environs = {
            local_rank: worker_environ(
                self._config,
                formed,
                node_id,
                local_rank=local_rank,
                master=self.master,
                nonce=self._nonce,
                memory_dir=self.memory_dir,
                committed_step=self.disk_step,
                unsaved_seconds=0.0 if self._unsaved_since is None else max(0.0, time.time() - self._unsaved_since),
            )
            for local_rank in range(self._config.nproc_per_node)
        }
        destination = self._logs_specs.reify(environs)
        plans = [
            WorkerPlan(
                local_rank=local_rank,
                rank=int(environ["RANK"]),
                environ=environ,
                stdout=destination.stdouts[local_rank],
                stderr=destination.stderrs[local_rank],
                error_file=destination.error_files[local_rank],
            )
            for local_rank, environ in environs.items()
        ]
        self._oom_kills = oom_kills()
        self.workers.start(plans, self._births, self._folder, self.standbys.take)
        self._console.start(destination, environs)  # not before: the workers are under way
        if previous:
            kill_round(self._nonce, previous)

    def reopen_logs(self) -> None:
        """After a rotation."""
        self.workers.reopen_logs()
        self._console.follow_rotated()

    def settle(self, now: float) -> None:
        self.done.settling_until = now + _SETTLE_SECONDS

    def dump_stacks(self, now: float) -> None:
        """Each worker writes its Python stacks into its log, before it is killed."""
        self.done.stacks_until = now + _STACKS_SECONDS
        self.workers.dump_stacks()

    def drain(self, now: float) -> None:
        """Ask every worker, through its block, to save and leave after the next step all agree on."""
        self.done.drain_until = now + self._config.drain_grace_seconds
        for worker in self.workers.alive:
            worker.request_drain()

    def terminate(self, now: float) -> None:
        """SIGTERM, for workers that are not in a training loop of ours; who is in it waits for them in vain."""
        self.done.terminate_until = now + self._config.shutdown_timeout_seconds
        for worker in self.workers.alive:
            worker.stopped_by_us = True
            worker.signal(signal.SIGKILL if worker.progress.in_loop else signal.SIGTERM)

    def kill(self) -> None:
        self.done.killed = True
        self.workers.kill()

    @property
    def has_peers(self) -> bool:
        """Whether other nodes may take part."""
        return self._config.max_nodes > 1

    @property
    def has_warm_standbys(self) -> bool:
        """Whether a round could be started without imports here, as far as that is wanted and works at all."""
        return not self._wants_standbys or self.standbys.are_ready(self._births)

    def prepare(self, *, is_newcomer: bool) -> bool:
        """Get ready what the next round will need, once the workers are in their loop: they come first until then.

        A newcomer, which waits for a running job, has none that it could disturb. Returns whether there are other
        standbys than before.
        """
        before = self.standbys.pids
        is_up = self._are_up()
        if self._wants_standbys and (is_newcomer or is_up):
            self.standbys.tend(self._births)
        if is_up and not self._config.master_port:
            with contextlib.suppress(UsageError, OSError):  # said when it is needed
                self.open_store()
        return self.standbys.pids != before

    def _are_up(self) -> bool:
        if self.done != RoundActs():
            return False
        return bool(self.workers.all) and all(worker.is_alive and _is_up(worker) for worker in self.workers.all)

    def clear(self, spare: frozenset[int]) -> None:
        """All workers are gone: kill what they have left behind, close logs and the round's store.

        This process is a child subreaper: whatever a worker left behind is below it, however it was started.
        """
        self.read_progress()
        if not kill_below(spare | self.standbys.pids, deadline=time.monotonic() + _SWEEP_SECONDS):
            logger.warning("round %d: a process of the job cannot be killed (uninterruptible sleep?)", self.round)
        self._console.stop()
        self.workers.close()
        self.workers.all = []

    def close(self) -> None:
        """End everything; idempotent."""
        self.standbys.close()
        self.workers.kill()
        for worker in self.workers.alive:
            worker.process.wait(30)
        self.workers.close()
        kill_everything(self._nonce, [], deadline=time.monotonic() + _SWEEP_SECONDS)
        self._store = self._next_store = None
        self._console.close()

    def first_failure(self) -> FailureStatus | None:
        if self.done.hung is not None:
            return failures.describe_hung(self.done.hung, self.workers.all, self._node_id)
        worker = failures.first_failure(self.failed)
        return None if worker is None else failures.describe(worker, self._node_id, self._oom_kills)


def kept_step(reports: Sequence[Progress], before: int) -> int:
    """The newest step that this node's memory holds whole: each rank keeps a share, and all are needed; -1: none.

    Until every worker of a round is in its loop it is `before`: what the last round has left is still there.
    """
    if not reports or not all(report.in_loop for report in reports):
        return before
    return min(report.memory_step for report in reports)


def _outcome(value: int) -> Outcome:
    """What the block says, as far as it makes sense: any process that has the path can write there."""
    return Outcome(value) if value in list(Outcome) else Outcome.NONE


def _is_up(worker: Worker) -> bool:
    """Whether it has got through its imports and its first step, as far as can be told from outside."""
    report = worker.progress
    if report.first_step_at:
        return True
    age = time.monotonic() - worker.started_at
    return age > (_SILENT_LOOP_SECONDS if report.pid else _WARM_UP_SECONDS if worker.was_warm else _COLD_UP_SECONDS)


def worker_view(worker: Worker) -> WorkerView:
    report = worker.progress
    return WorkerView(
        local_rank=worker.plan.local_rank,
        exit_code=worker.exit_code,
        outcome=_outcome(report.outcome),
        in_loop=bool(report.in_loop),
        consequence=failures.is_consequence(worker),
        stopped_by_us=worker.stopped_by_us,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket for the store, on loopback unless an address was asked for; ::1 where there is no IPv4.

    Raises: UsageError: nobody can listen there. OSError: not now.
    """
    failures_seen = []
    for candidate in [host] if host else ["127.0.0.1", "::1"]:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(candidate, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(1024)
            except OSError:
                listener.close()
                raise
        except OSError as exc:
            if lacks_room(exc, port=port):
                raise
            failures_seen.append(f"{candidate}:{port}: {exc.strerror or exc}")
        else:
            return listener
    raise UsageError(
        f"cannot listen for the workers' store at {'; '.join(failures_seen)}: see --master-addr, --master-port"
    )
