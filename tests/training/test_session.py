"""What a worker reports, and what the ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic import progress
from elastic.progress import Outcome, Phase
from elastic.training.environment import WorkerEnvironment, read_environment
from elastic.training.session import Session
from tests.support.ranks import run_ranks
from tests.training.worlds import make_session


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """What sessions do to them is not left to the tests of others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def under_agent(tmp_path: Path) -> tuple[Session, progress.ProgressReader]:
    path = tmp_path / "block"
    progress.create(path)
    return Session(read_environment({"ELASTICD_PROGRESS": str(path)})), progress.ProgressReader(path)


def test_alone_everything_works_and_says_nothing() -> None:
    session = Session(WorkerEnvironment())
    session.enter_loop(step=0, base_step=0)
    agreed = session.agree(save=True, sums=(1.5, 2.0))
    session.report(step=1, loss=1.0)
    session.finished(1)
    assert (agreed.stop, agreed.save, agreed.sums) == (False, True, (1.5, 2.0))
    assert session.store() is None
    assert not session.under_agent


def test_the_agent_sees_loop_steps_phases_and_outcome(tmp_path: Path) -> None:
    session, agent = under_agent(tmp_path)
    first = agent.read()
    assert first is not None
    assert (first.pid, first.in_loop, first.phase, first.started_at > 0) == (os.getpid(), 0, Phase.STARTING, True)
    session.enter_loop(step=7, base_step=7)
    with session.phase(Phase.CHECKPOINT):
        inside = agent.read()
    session.report(step=8, loss=0.5, samples_total=64)
    session.count(checkpoint_failures_total=2)
    last = agent.read()
    assert inside is not None
    assert last is not None
    assert (inside.in_loop, inside.base_step, inside.phase) == (1, 7, Phase.CHECKPOINT)
    assert (last.step, last.loss, last.samples_total, last.checkpoint_failures_total) == (8, 0.5, 64, 2)
    assert last.phase == Phase.STARTING
    assert last.first_step_at >= first.started_at
    for say, outcome in ((session.drained, Outcome.DRAINED), (session.finished, Outcome.FINISHED)):
        say(9)
        told = agent.read()
        assert told is not None
        assert (told.outcome, told.step) == (outcome, 9)
    session.fatal(ValueError("x"))
    told = agent.read()
    assert told is not None
    assert told.outcome == Outcome.FATAL


@pytest.mark.parametrize(
    ("tier", "path", "told"),
    [
        ("disk", "/ckpt/step-000000000012", (12, -1)),
        ("memory", "/dev/shm/mine", (4, 12)),
        ("memory", "/dev/shm/mine/received-1", (4, -1)),  # a peer has sent it
    ],
)
def test_what_was_restored_is_told_to_the_agent(tmp_path: Path, tier: str, path: str, told: tuple[int, int]) -> None:
    block = tmp_path / "block"
    progress.create(block)
    session = Session(read_environment({"ELASTICD_PROGRESS": str(block), "ELASTICD_MEMORY_DIR": "/dev/shm/mine"}))
    session.restored(None)
    session.restored(SimpleNamespace(step=12, tier=tier, path=path, disk_step=4))
    report = progress.ProgressReader(block).read()
    assert report is not None
    assert (report.disk_step, report.memory_step) == told


def test_requests_of_the_agent_enter_the_agreement_a_save_once_each(tmp_path: Path) -> None:
    session, agent = under_agent(tmp_path)
    assert not session.agree().save
    agent.request_save()
    agent.request_save()
    assert [session.agree().save for _ in range(3)] == [True, False, False]
    agent.request_save()
    assert session.agree().save
    agent.request_drain()
    assert [session.agree().stop for _ in range(2)] == [True, True]


def test_sigterm_without_a_launcher_is_a_request_to_stop() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        session = Session(WorkerEnvironment())
        session.enter_loop(step=0, base_step=0)
        assert not session.agree().stop
        for _ in range(50):  # at whatever moment of its birth the signal comes
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
                child = os.fork()
            if not child:
                time.sleep(10)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM, "a forked process is not the session's"
        assert not session.agree().stop
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10  # any thread may get the signal; the handler runs in this one soon
        while not session.agree().stop:
            assert time.monotonic() < deadline
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the second one kills
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_is_entered_again_after_sigterm_hears_it_again_also_after_a_fork() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        session = Session(WorkerEnvironment())
        for _ in range(2):
            session.enter_loop(step=0, base_step=0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
                child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            signal.raise_signal(signal.SIGTERM)
            assert session.agree().stop
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.signal(signal.SIGTERM, before)


def _agree(rank: int, world_size: int, store: Any) -> list[Any]:
    session = make_session(rank, world_size, store)
    rounds = []
    for step in range(200):
        pending = session.begin_agree(
            stop=step == 150 and rank == 1, busy=rank == 2, sums=(float(rank), float(step), float("inf"))
        )
        rounds.append(pending.wait())
    return [rounds[0], rounds[149], rounds[150]]


def test_all_ranks_read_the_same_agreement_after_the_same_step() -> None:
    results = run_ranks(3, _agree, process_group=True)
    assert results[0] == results[1] == results[2]
    first, before, at = results[0]
    assert (first.stop, first.busy, first.sums) == (False, True, (3.0, 0.0, float("inf")))
    assert (before.stop, at.stop, at.sums[1]) == (False, True, 450.0)


def test_ranks_without_a_process_group_are_told_to_make_one() -> None:
    session = Session(WorkerEnvironment(rank=0, world_size=2, launched=True, elastic=True))
    with pytest.raises(RuntimeError, match="init_process_group"):
        session.agree()


class RunAhead(dist.ProcessGroup):
    """A backend as CUDA's: all_reduce returns, and its wait too, before the sum (of equal contributions) is there."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size
        self.threads: list[threading.Thread] = []

    def getBackendName(self) -> str:
        return "runahead"

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> dist.Work:
        def reduce_later() -> None:
            time.sleep(0.05)
            for tensor in tensors:
                tensor.mul_(self._size)

        self.threads.append(threading.Thread(target=reduce_later))
        self.threads[-1].start()
        return Done()


class Done(dist._Work):
    def wait(self, timeout: object = None) -> bool:
        return True


def _make_run_ahead(store: dist.Store, rank: int, size: int, timeout: object) -> RunAhead:
    global _backend
    _backend = RunAhead(rank, size)
    return _backend


_backend: RunAhead | None = None


def _agree_beside_run_ahead(rank: int, world_size: int, store: Any) -> tuple[float, list[tuple[bool, float]]]:
    dist.Backend.register_backend("runahead", _make_run_ahead, devices=["cpu"])
    dist.init_process_group("runahead", store=dist.PrefixStore("main", store), rank=rank, world_size=world_size)
    session = make_session(rank, world_size, store)
    value = torch.ones(1)
    dist.all_reduce(value)
    stale = value.item()
    agreed = []
    for step in range(50):
        pending = session.begin_agree(stop=step == 30 and rank == 0, sums=(1.0,))
        dist.all_reduce(torch.ones(1), async_op=True)
        result = pending.wait()
        agreed.append((result.stop, result.sums[0]))
    assert _backend is not None
    for thread in _backend.threads:
        thread.join(30)
    dist.destroy_process_group()
    return stale, agreed


def test_the_agreement_is_read_when_it_is_made_though_the_main_backend_runs_ahead() -> None:
    for stale, agreed in run_ranks(2, _agree_beside_run_ahead):
        assert stale == 1.0  # this backend does return too early
        assert agreed == [(step == 30, 2.0) for step in range(50)]
