"""When a save is due, what the agent hears of it, and whose `checkpoints` is imported."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.restore import Restored
from elastic import progress
from elastic.progress import Outcome
from elastic.training.environment import Every, WorkerEnvironment
from elastic.training.saving import SavePolicy, Saver
from elastic.training.session import Session
from elastic.training.state import is_sharded
from elastic.training.trainer import AppliedStep, Trainer, TrainerConfig
from tests.support.job import wait_for
from tests.support.ranks import KILLED, run_ranks
from tests.training.worlds import SentenceTask, make_session


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_saves_are_due_by_steps() -> None:
    policy = SavePolicy(Every(steps=3), is_clock=True)
    due = []
    for step in range(1, 10):
        due.append(policy.decide(step, asked=False, busy=False))
        if due[-1]:
            policy.saved()
    assert due == [False, False, True] * 3


def test_a_save_that_finds_a_rank_busy_waits_for_its_turn_and_comes_once() -> None:
    policy = SavePolicy(Every(steps=3), is_clock=True)
    busy = [False, False, True, True, False, False]
    due = []
    for step, is_busy in enumerate(busy, start=1):
        due.append(policy.decide(step, asked=False, busy=is_busy))
        if due[-1]:
            policy.saved()
    assert due == [False, False, False, False, True, True]  # the one of step 3 at 5, then that of step 6


def test_time_is_told_by_one_rank_and_starts_anew_with_every_save() -> None:
    clock = Clock()
    policy = SavePolicy(Every(seconds=10.0), is_clock=True, now=clock)
    other = SavePolicy(Every(seconds=10.0), is_clock=False, now=clock)
    clock.now += 9.9
    assert not policy.clock_says_save()
    clock.now += 0.2
    assert policy.clock_says_save()
    assert not other.clock_says_save()
    assert other.decide(7, asked=True, busy=False)
    policy.saved()
    assert not policy.clock_says_save()


def test_rounds_that_are_shorter_than_the_interval_save_once_it_is_over() -> None:
    clock, saves = Clock(), []
    for begun in (0.0, 8.0, 16.0):  # a failure every 8 s
        last = saves[-1] if saves else 0.0
        policy = SavePolicy(Every(seconds=20.0), is_clock=True, unsaved_seconds=begun - last, now=clock)
        for _ in range(8):
            clock.now += 1.0
            if policy.clock_says_save():
                policy.saved()
                saves.append(begun + 4.0)
    assert len(saves) == 1


def test_without_an_interval_only_requests_save() -> None:
    policy = SavePolicy(None, is_clock=True)
    assert not policy.decide(1, asked=False, busy=False)
    assert policy.decide(2, asked=True, busy=False)


class Asking(SentenceTask):
    """Plays the agent of its rank: asks for what `requests` says after a step, and notes what it reads then."""

    def __init__(self, requests: dict[int, str], *, ranks: tuple[int, ...]) -> None:
        super().__init__(size=64)
        self.requests, self.ranks = requests, ranks
        self.agent: progress.ProgressReader | None = None

    def on_step(self, step: AppliedStep) -> None:
        super().on_step(step)
        assert self.agent is not None
        if step.rank in self.ranks and step.step in self.requests:
            getattr(self.agent, f"request_{self.requests[step.step]}")()


def _train_under_agent(rank: int, world_size: int, store: Any, task: Asking, config: TrainerConfig, folder: str) -> Any:
    block = Path(folder) / f"block-{rank}"
    progress.create(block)
    task.agent = progress.ProgressReader(block)
    session = make_session(
        rank, world_size, store, progress_path=str(block), round=4, checkpoint_dir=str(Path(folder) / "kept")
    )
    result = Trainer(task, config, session=session).run()
    return result, task.agent.read()


CONFIG = TrainerConfig(global_batch_size=8, micro_batch_size=2, steps=8, checkpoint_keep_last=9)


def test_a_save_asked_of_all_agents_is_one_save_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _train_under_agent, Asking({3: "save"}, ranks=(0, 1)), CONFIG, str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "kept").glob("step-*")) == ["step-000000000004", "step-000000000008"]


def test_a_drain_asked_of_one_agent_is_told_to_both_with_a_committed_step(tmp_path: Path) -> None:
    runs = run_ranks(2, _train_under_agent, Asking({3: "drain"}, ranks=(1,)), CONFIG, str(tmp_path))
    for rank, (result, told) in enumerate(runs):
        assert (result.drained, result.step) == (True, 4)
        assert (told.outcome, told.step, told.disk_step, told.base_step) == (Outcome.DRAINED, 4, 4, 0)
        assert (told.rank, told.round, told.world_size, told.in_loop) == (rank, 4, 2, 1)
        assert (told.samples_total, told.skipped_steps_total, told.epoch) == (16, 0, 0)  # this rank's half of 32
        assert told.loss == result.loss
        assert told.learning_rate == 0.5
        assert told.grad_norm > 0
        assert told.checkpoint_bytes_total > 0
        assert told.grad_syncs_total == 4
        assert told.grad_syncs_skipped_total == 4
        assert told.comm_bytes_total > 0
        assert told.comm_seconds_total > 0
        assert told.step_seconds > 0


def test_finished_training_says_so(tmp_path: Path) -> None:
    for result, told in run_ranks(2, _train_under_agent, Asking({}, ranks=()), CONFIG, str(tmp_path)):
        assert (result.drained, told.outcome, told.step, told.disk_step) == (False, Outcome.FINISHED, 8, 8)


def test_an_error_that_would_come_back_is_marked_fatal(tmp_path: Path) -> None:
    assert run_ranks(1, _fail, str(tmp_path))[0].outcome == Outcome.FATAL


def _fail(rank: int, world_size: int, store: Any, folder: str) -> Any:
    task = Asking({}, ranks=())
    task.size = 0
    with pytest.raises(Exception, match="is empty"):
        _train_under_agent(rank, world_size, store, task, CONFIG, folder)
    assert task.agent is not None
    return task.agent.read()


def test_time_based_saves_come_with_training(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_every="0.000001s")
    run_ranks(2, _train_under_agent, Asking({}, ranks=()), config, str(tmp_path))
    assert len(list((tmp_path / "kept").glob("step-*"))) >= 2


SCRIPT = """
    import sys
    import torch
    import checkpoints                       # the user's own, beside the script
    from elastic.training.trainer import Task, Trainer, TrainerConfig

    class Items:
        def __len__(self): return 24
        def __getitem__(self, i):
            import checkpoints               # in the loader worker too
            return torch.full((3,), float(i + checkpoints.MINE - 42))

    class Small(Task):
        def model(self): return torch.nn.Linear(3, 1)
        def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.0001)
        def dataset(self): return Items()
        def loss(self, model, batch): return model(batch).pow(2).sum(), len(batch)

    if __name__ == "__main__":
        result = Trainer(Small(), TrainerConfig(
            global_batch_size=8, micro_batch_size=4, steps=int(sys.argv[2]), checkpoint_dir=sys.argv[1], device="cpu",
            loader_workers=int(sys.argv[3]), loader_start_method=sys.argv[4],
        )).run()
        assert checkpoints.MINE == 42 and "CheckpointManager" not in dir(checkpoints)
        import pickle
        assert pickle.loads(pickle.dumps(checkpoints.Theirs())).__class__ is checkpoints.Theirs
        sys.stdout.write(f"{result.step} {result.samples} {result.loss}\\n")  # in one piece: ranks share the pipe
"""


def run_script(tmp_path: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "checkpoints.py").write_text("MINE = 42\nclass Theirs: pass\n")
    done = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path / "kept"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_users_checkpoints_module_does_not_shadow_ours_nor_ours_theirs(tmp_path: Path) -> None:
    assert run_script(tmp_path, "2", "1", "spawn").startswith("2 16 ")
    assert (tmp_path / "kept" / "step-000000000002" / "manifest.json").exists()


def test_the_same_script_trains_under_plain_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = run_script(tmp_path, "3", "0", "fork", launcher=launcher).splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert (tmp_path / "kept" / "step-000000000003" / "shard-00001-of-00002.safetensors").exists()


class Dying(SentenceTask):
    """Rank 1 is killed once it has applied a step, in the middle of the next one."""

    def __init__(self, step: int = 0) -> None:
        super().__init__(size=64, optimizer="adam", dropout=0.3)
        self.at = step

    def on_step(self, step: AppliedStep) -> None:
        super().on_step(step)
        if step.rank == 1 and step.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def _train_with_memory(
    rank: int, world_size: int, store: Any, task: Dying, config: TrainerConfig, folder: str, round_: int
) -> Any:
    block = Path(folder) / f"block-{rank}"
    progress.create(block)
    session = make_session(
        rank,
        world_size,
        store,
        progress_path=str(block),
        round=round_,
        checkpoint_dir=str(Path(folder) / "kept") if config.checkpoint_every else None,
        memory_dir=str(Path(folder) / "shm"),
        memory_rank=rank,
        local_world_size=world_size,
        memory_every=1,
    )
    try:
        Trainer(task, config, session=session).run()
    except RuntimeError:
        return None  # its peer was killed
    told = progress.ProgressReader(block).read()
    assert told is not None
    return task.digests, [step.step for step in task.steps], told.base_step, told.memory_step, told.memory_bytes_total


@pytest.mark.parametrize("checkpoint_every", [3, None])
def test_a_killed_worker_costs_one_step_at_most_and_the_end_is_bit_equal(
    tmp_path: Path, checkpoint_every: int | None
) -> None:
    config = TrainerConfig(
        global_batch_size=8, micro_batch_size=2, steps=9, grad_clip_norm=1.0, checkpoint_every=checkpoint_every
    )
    (tmp_path / "straight").mkdir()
    (tmp_path / "killed").mkdir()
    straight, _ = run_ranks(2, _train_with_memory, Dying(), config, str(tmp_path / "straight"), 1)
    digests, used = {}, []
    for round_, dies_after in enumerate((5, 8, 0), start=1):
        runs = run_ranks(
            2, _train_with_memory, Dying(dies_after), config, str(tmp_path / "killed"), round_, may_die=True
        )
        if dies_after:
            assert runs == [None, KILLED]
            continue
        digests = dict(zip(runs[0][1], runs[0][0], strict=True))
        assert runs[0][2] in (7, 8)  # disk alone would give 6, or 0
        assert runs[0][3] == 9
        assert runs[0][4] > 0
        used = runs[0][1]
    assert digests[9] == straight[0][-1]
    assert used == list(range(runs[0][2] + 1, 10))  # no step is left out


def test_a_rank_that_cannot_keep_its_share_says_so_and_its_node_has_no_step_in_memory(tmp_path: Path) -> None:
    """Directories where its slots should be; its peer goes on sealing."""
    for number in range(3):
        (tmp_path / "shm" / f"rank-1-slot-{number}").mkdir(parents=True)
    config = TrainerConfig(global_batch_size=8, micro_batch_size=2, steps=5)
    runs = run_ranks(2, _train_with_memory, Dying(), config, str(tmp_path), 1)
    assert [run[3] for run in runs] == [5, -1]


def test_a_step_that_was_restored_or_kept_is_safe_in_memory_until_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.create(tmp_path / "block")
    agent = progress.ProgressReader(tmp_path / "block")

    def memory_step() -> int:
        report = agent.read()
        assert report is not None
        return report.memory_step

    def restored() -> Saver:
        saver = Saver(CONFIG, Session(environment))
        saver.open()
        saver.restore(like=state, fingerprint="")
        return saver

    environment = WorkerEnvironment(memory_dir=str(tmp_path / "shm"), progress_path=str(tmp_path / "block"))
    state = {"w": torch.zeros(100_000)}
    with restored() as saver:
        assert memory_step() == -1
        saver.keep(7, lambda: state, samples=0, fingerprint="")
    with restored():
        assert memory_step() == 7
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", _refuse)
        with restored() as saver:
            wait_for(lambda: memory_step() == -1, seconds=10.0, what="the tier warms its slots, in vain")
            saver.keep(8, lambda: state, samples=0, fingerprint="")
            assert memory_step() == -1
            full.undo()
            assert saver._tier is not None
            saver._tier._retry_at = 0.0
            saver.keep(9, lambda: state, samples=0, fingerprint="")
            saver.settle()
            assert memory_step() == 9
            full.setattr(os, "posix_fallocate", _refuse)
            saver.keep(10, lambda: {"w": torch.zeros(200_000)}, samples=0, fingerprint="")
            assert memory_step() == -1


def test_a_tier_that_is_off_before_the_restore_keeps_nothing_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new node's folder cannot be made, and a peer sends it the state."""
    progress.create(tmp_path / "block")
    session = Session(WorkerEnvironment(memory_dir=str(tmp_path / "shm"), progress_path=str(tmp_path / "block")))
    saver = Saver(CONFIG, session)
    saver.open()
    assert saver._manager is not None
    assert saver._tier is not None
    sent = Restored(step=7, round=1, base_step=0, samples=0, state={}, path="", skipped=(), tier="memory", disk_step=3)
    monkeypatch.setattr(saver._manager, "restore", lambda *_, **__: sent)
    saver._tier.problem = "no room"
    saver.restore(like={}, fingerprint="")
    told = progress.ProgressReader(tmp_path / "block").read()
    assert told is not None
    assert (told.memory_step, told.disk_step) == (-1, 3)


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_sharded_optimizer_is_said_not_to_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert is_sharded(optimizer)
    assert not is_sharded(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    session = Session(WorkerEnvironment(memory_dir="/nowhere"))
    Saver(CONFIG, session, sharded=True)
    assert "no node has it whole" in caplog.text
