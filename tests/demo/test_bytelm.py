"""The worker as a program of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.demo import bytelm as bytelm_module
from elastic.demo.bytelm import ByteLM, main, parse
from elastic.demo.ledger import audit, planned_steps, read_ledger
from elastic.demo.outcome import last_loss, read_losses
from elastic.errors import UsageError
from elastic.training.task import AppliedStep
from tests.support.plain import be_launched
from tests.support.ranks import KILLED, run_ranks

SMALL = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--lr", "3e-3")


def bytelm(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic.demo.bytelm", *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def _main(rank: int, world_size: int, store: object, flags: tuple[str, ...]) -> int:
    return main(flags)


def train(*flags: str) -> None:
    """The worker's `main` in a process of its own that has imported torch already."""
    assert run_ranks(1, _main, (*SMALL, *flags), timeout_seconds=100) == [0]


def test_alone_it_writes_ledger_losses_and_digest_and_goes_on_where_it_was(tmp_path: Path) -> None:
    files = ("--ledger", f"{tmp_path}/ledger", "--losses", f"{tmp_path}/losses", "--digest", f"{tmp_path}/digest")
    checkpoints = ("--checkpoint-dir", f"{tmp_path}/checkpoints", "--save-every", "4", "--dropout", "0.1")
    job = ("--samples", "50", "--global-batch", "8", "--micro-batch", "3", "--seed", "7", *checkpoints)

    train(*job, "--steps", "20", *files)
    train(*job, "--steps", "30", *files)
    train(*job[:8], *checkpoints[4:], "--steps", "30", "--digest", f"{tmp_path}/straight")

    ledger = read_ledger((tmp_path / "ledger").read_text())
    plan = planned_steps(samples=50, global_batch=8, micro_batch=3, seed=7, steps=30)
    found = audit(ledger.entries, plan)
    assert found.is_right, found
    assert (ledger.torn, found.repeated_steps) == (0, ())
    assert (tmp_path / "ledger").read_text().startswith('{"round":1,"step":1,"epoch":0,"rank":0,"samples":[')

    losses = read_losses((tmp_path / "losses").read_text())
    assert list(losses) == list(range(1, 31))
    assert losses[30] < losses[1] - 1
    assert last_loss(tmp_path / "losses") == losses[30]

    assert re.fullmatch(r"30 [0-9a-f]{64}\n", (tmp_path / "digest").read_text())
    assert (tmp_path / "digest").read_text() == (tmp_path / "straight").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"ledger", "losses", "digest", "straight", "checkpoints"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--steps", "0"), "argument --steps: 0 is too small; give at least 1"),
        (("--samples", "x"), "argument --samples: 'x' is no whole number"),
        (("--step-seconds", "nan"), "argument --step-seconds: nan is out of range"),
        (("--steps", "3", "--epochs", "1"), "give exactly one of them"),
        (("--heads", "5"), "not divisible by heads 5"),
        (("--save-every", "often"), "often"),
    ],
)
def test_a_bad_value_is_refused_by_name(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        main(flags)


def test_the_pace_is_looked_up_after_each_step(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    task = ByteLM(parse([*SMALL, "--step-seconds", "2", "--pace", str(pace)]), world_size=2)  # 2 micro-batches each
    applied = AppliedStep(
        round=1, step=1, epoch=0, rank=1, samples=(), applied=True, loss=1, weight=1, learning_rate=1, grad_norm=1
    )
    for text, seconds in ((None, 1.0), ("0.5", 0.25), ("", 1.0), ("0", 0.0)):
        if text is not None:
            pace.write_text(text)
        task.on_step(applied)
        assert task._pause_seconds == seconds


def test_a_bad_value_is_one_clear_line_and_exit_2() -> None:
    done = bytelm("--steps", "1", "--ledger", "/no/such/folder/file")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("bytelm: error: cannot write /no/such/folder/file: No such file")
    assert "Traceback" not in done.stderr


def _main_launched(rank: int, world_size: int, store: object, flags: tuple[str, ...]) -> int:
    be_launched(rank, world_size, store)
    return main(flags)


@pytest.mark.parametrize(("before", "steps"), [(1, 1), (5, 7)])
def test_what_a_rank_was_killed_too_early_to_write_is_written_by_the_next_round(
    tmp_path: Path, before: int, steps: int
) -> None:
    """As when a node is lost right after an update, which the others keep in their memory and go on from: also where
    it was the first step, or no step is left."""
    ledger = tmp_path / "ledger"
    job = ("--samples", "50", "--global-batch", "8", "--micro-batch", "3", "--ledger", f"{ledger}")
    train(*job, "--checkpoint-dir", f"{tmp_path}/checkpoints", "--steps", f"{before}")
    *lines, last = ledger.read_text().splitlines(keepends=True)
    record = json.loads(last)
    half = {**record, "rank": 1, "samples": record["samples"][:3]}
    ledger.write_text("".join(lines) + json.dumps(half, separators=(",", ":")) + "\n")

    train(*job, "--checkpoint-dir", f"{tmp_path}/checkpoints", "--steps", f"{steps}")

    plan = planned_steps(samples=50, global_batch=8, micro_batch=3, seed=0, steps=steps)
    found = audit(read_ledger(ledger.read_text()).entries, plan)
    assert found.is_right and found.repeated_steps == (), found
    written = [json.loads(text) for text in ledger.read_text().splitlines()]
    assert len(written) == steps + 1
    assert written[before] == {**record, "samples": record["samples"][3:], "closed_by": 1}

    with ledger.open("a") as file:  # it was frozen, not killed
        file.write(json.dumps({**record, "samples": record["samples"][3:]}) + "\n")
    assert audit(read_ledger(ledger.read_text()).entries, plan) == found


def _main_on_nodes(
    rank: int, world_size: int, store: object, folder: str, round_: int, dies: bool, flags: tuple[str, ...]
) -> int | None:
    """Each rank is a node with a memory of its own; `dies`: rank 1, between its first update and its line."""
    be_launched(rank, world_size, store)
    memory = f"{folder}/node-{rank}"
    os.environ.update(ELASTICD_ROUND=f"{round_}", ELASTICD_MEMORY_DIR=memory, ELASTICD_MEMORY_EVERY="1")
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if dies and rank == 1:
        bytelm_module.ledger_record = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    try:
        return main(flags)
    except RuntimeError:
        return None  # its peer was killed


def test_a_node_killed_between_the_last_update_and_its_line_has_lost_no_sample(tmp_path: Path) -> None:
    """The other one has kept that step, and no step is left to train."""
    job = ("--samples", "50", "--global-batch", "8", "--micro-batch", "4", "--steps", "1")
    flags = (*SMALL, *job, "--ledger", f"{tmp_path}/ledger")
    runs = run_ranks(2, _main_on_nodes, f"{tmp_path}", 1, True, flags, may_die=True, timeout_seconds=100)
    assert runs == [None, KILLED]
    assert run_ranks(2, _main_on_nodes, f"{tmp_path}", 2, False, flags, timeout_seconds=100) == [0, 0]
    ledger = read_ledger((tmp_path / "ledger").read_text())
    found = audit(ledger.entries, planned_steps(samples=50, global_batch=8, micro_batch=4, seed=0, steps=1))
    assert found.is_right, found
    assert [(entry.round, entry.rank, entry.closed_by) for entry in ledger.entries] == [(1, 0, None), (1, 1, 2)]


def test_under_a_launcher_its_ranks_share_the_ledger(tmp_path: Path) -> None:
    flags = ("--steps", "3", "--samples", "10", "--global-batch", "4", "--ledger", f"{tmp_path}/ledger")
    files = ("--digest", f"{tmp_path}/digest")
    assert run_ranks(2, _main_launched, (*SMALL, *flags, *files), timeout_seconds=100) == [0, 0]
    ledger = read_ledger((tmp_path / "ledger").read_text())
    found = audit(ledger.entries, planned_steps(samples=10, global_batch=4, micro_batch=4, seed=0, steps=3))
    assert found.is_right, found
    # One micro-batch a step: the second rank has no share and says so.
    assert [e.samples for e in ledger.entries if e.rank == 1] == [(), (), ()]
    assert (tmp_path / "digest").read_text().startswith("3 ")
