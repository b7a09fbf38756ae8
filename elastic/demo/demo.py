"""`elasticd demo`: train, kill a worker, go on, train again without the kill, compare.

Both runs are real: an agent each, started as a user would start it. What they left behind is judged in `outcome`.
With several nodes it is `nodes` that has the runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from elastic.demo.nodes import NodesDemo
from elastic.demo.nodes_outcome import NodesOutcome
from elastic.demo.nodes_report import nodes_table
from elastic.demo.outcome import Kill, Outcome, read_run
from elastic.demo.report import table
from elastic.demo.screen import Screen
from elastic.demo.settings import parse
from elastic.demo.stage import DemoFailedError, InterruptedDemoError, Stage
from elastic.errors import ExitCode
from elastic.status import Incident, JobStatus, WorkerStatus, plural


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 only when all is right. Raises: UsageError, DemoFailedError."""
    settings = parse(argv)
    screen = Screen(Console(stderr=settings.json))
    folder = Path(tempfile.mkdtemp(prefix="elasticd-demo-"))
    with _signals() as signals:
        try:
            stage = Stage(settings, screen, folder, signals)
            outcome = NodesDemo(stage).run() if settings.nodes > 1 else _Demo(stage).run()
        except InterruptedDemoError:
            screen.say("stopped; nothing is left running")
            return 128 + signals[0]
        finally:
            if settings.keep:
                screen.say(f"logs, ledgers and checkpoints are kept in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return _tell(outcome, screen)


def _tell(outcome: Outcome | NodesOutcome, screen: Screen) -> int:
    screen.console.print(table(outcome) if isinstance(outcome, Outcome) else nodes_table(outcome))
    faults = outcome.faults()
    for fault in faults:
        screen.say(f"WRONG: {fault}", style="bold red")
    if not faults:
        screen.say(f"All is right: no sample lost, none used twice. ({outcome.seconds:.0f} s)", style="bold green")
    if outcome.settings.json:
        sys.stdout.write(json.dumps(outcome.to_json()) + "\n")
    return int(ExitCode.FAILED if faults else ExitCode.SUCCEEDED)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that ask us to stop are noted here, and looked for where it is safe to."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Demo:
    """The two runs with one agent each."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._settings, self._screen = stage, stage.settings, stage.screen
        self._kill: Kill | None = None
        self._incident: Incident | None = None

    def run(self) -> Outcome:
        began = time.monotonic()
        settings, say, folder = self._settings, self._screen.say, self._stage.folder
        say(f"training a small language model on {settings.data} with {plural(settings.workers, 'worker')}")
        self._stage.train_alone("killed", self._disturb)
        if self._kill is None:
            raise DemoFailedError("training was over before a worker could be killed; give more --steps")
        say("once more, without the kill and at full speed, to compare")
        self._stage.train_alone("reference")
        return Outcome(
            settings=settings,
            kill=self._kill,
            incident=self._incident,
            disturbed=read_run(folder / "killed", settings),
            reference=read_run(folder / "reference", settings),
            seconds=time.monotonic() - began,
        )

    def _disturb(self, status: JobStatus) -> None:
        """Kill once, when it is time; then wait to hear of the recovery."""
        if self._kill is None:
            victim = max(status.workers, key=lambda worker: worker.rank or 0, default=None)
            if victim is not None and status.state == "running" and self._is_time(victim, status):
                self._kill = kill = _kill(victim, status.round)
                if kill is not None:
                    self._screen.say(f"  killed rank {kill.rank} (pid {kill.pid}) with SIGKILL at step {kill.step}")
        elif self._incident is None:
            self._incident = next((i for i in status.incidents if i.seconds.total is not None), None)
            if self._incident is not None:
                again = "1 step comes" if self._incident.lost_steps == 1 else f"{self._incident.lost_steps} steps come"
                self._screen.say(
                    f"  going on at step {(status.base_step or 0) + 1} in round {self._incident.round}, "
                    f"{self._incident.seconds.total:.2f} s after the kill; {again} again"
                )

    def _is_time(self, victim: WorkerStatus, status: JobStatus) -> bool:
        return (victim.step or 0) >= self._settings.kill_at and self._settings.may_change(status)


def _kill(victim: WorkerStatus, round_number: int) -> Kill | None:
    """SIGKILL; None when it was gone already."""
    if victim.pid is None or victim.rank is None:
        return None
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Kill(rank=victim.rank, pid=victim.pid, step=victim.step or 0, round=round_number)
