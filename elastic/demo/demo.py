"""`elasticd demo`: train, kill a worker, go on, train again without the kill, compare.

Both runs are real: an agent each, started as a user would start it. What they left behind is judged in `outcome`.
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

from elastic.demo.job import Job
from elastic.demo.outcome import Kill, Outcome, last_loss, read_run
from elastic.demo.report import table
from elastic.demo.screen import Moved, Screen
from elastic.demo.settings import Settings, parse
from elastic.errors import ElasticError, ExitCode
from elastic.status import Incident, JobStatus, WorkerStatus

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 120.0  # without any news of a run: a slow machine needs a while to import torch


class DemoFailedError(ElasticError):
    """A run could not be brought to its end."""


class InterruptedDemoError(ElasticError):
    """Somebody wants us to stop."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 only when all is right. Raises: UsageError, DemoFailedError."""
    settings = parse(argv)
    screen = Screen(Console(stderr=settings.json))
    folder = Path(tempfile.mkdtemp(prefix="elasticd-demo-"))
    with _signals() as signals:
        try:
            outcome = _Demo(settings, screen, folder, signals).run()
        except InterruptedDemoError:
            screen.say("stopped; nothing is left running")
            return 128 + signals[0]
        finally:
            if settings.keep:
                screen.say(f"logs, ledgers and checkpoints are kept in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return _tell(outcome, screen)


def _tell(outcome: Outcome, screen: Screen) -> int:
    screen.console.print(table(outcome))
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
    """The two runs, one after the other so that each has the machine to itself."""

    def __init__(self, settings: Settings, screen: Screen, folder: Path, signals: list[int]) -> None:
        self._settings, self._screen, self._folder, self._signals = settings, screen, folder, signals
        self._kill: Kill | None = None
        self._incident: Incident | None = None

    def run(self) -> Outcome:
        began = time.monotonic()
        settings, say = self._settings, self._screen.say
        say(f"training a small language model on {settings.data} with {settings.workers} workers")
        self._train("killed", is_disturbed=True)
        if self._kill is None:
            raise DemoFailedError("training was over before a worker could be killed; give more --steps")
        say("once more, without the kill, to compare")
        self._train("reference", is_disturbed=False)
        return Outcome(
            settings=settings,
            kill=self._kill,
            incident=self._incident,
            disturbed=read_run(self._folder / "killed", settings),
            reference=read_run(self._folder / "reference", settings),
            seconds=time.monotonic() - began,
        )

    def _train(self, name: str, *, is_disturbed: bool) -> None:
        """One run from start to end. Raises: DemoFailedError when it does not end well."""
        folder, began = self._folder / name, time.monotonic()
        job = Job(self._settings.command(folder), folder)
        with contextlib.ExitStack() as stack:
            stack.callback(job.stop)
            moved = stack.enter_context(self._screen.progress(self._settings.steps))
            self._follow(job, moved, is_disturbed=is_disturbed)
            if job.exit_code != 0:
                raise DemoFailedError(f"the agent ended with {job.exit_code}:\n{job.last_words()}")
        self._screen.say(f"  {self._settings.steps} steps done in {time.monotonic() - began:.1f} s")

    def _follow(self, job: Job, moved: Moved, *, is_disturbed: bool) -> None:
        """Look on until the agent ends; once in the middle, do more than look."""
        seen: tuple[object, ...] = ()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while job.exit_code is None:
            if self._signals:
                raise InterruptedDemoError(f"signal {self._signals[0]}")
            if time.monotonic() >= deadline:
                raise DemoFailedError(f"no news of the run for {_PATIENCE_SECONDS:.0f} s:\n{job.last_words()}")
            status = job.status()
            if status is not None:
                steps = [worker.step or 0 for worker in status.workers]
                if seen != (news := (status.state, status.round, *steps)):
                    seen, deadline = news, time.monotonic() + _PATIENCE_SECONDS
                moved(min(steps, default=0), last_loss(job.folder / "losses.jsonl"), status.state)
                if is_disturbed:
                    self._disturb(status)
            time.sleep(_LOOK_SECONDS)

    def _disturb(self, status: JobStatus) -> None:
        """Kill once, when it is time; then wait to hear of the recovery."""
        if self._kill is None:
            victim = max(status.workers, key=lambda worker: worker.rank or 0, default=None)
            if victim is not None and status.state == "running" and (victim.step or 0) >= self._settings.kill_at:
                self._kill = kill = _kill(victim, status.round)
                if kill is not None:
                    self._screen.say(f"  killed rank {kill.rank} (pid {kill.pid}) with SIGKILL at step {kill.step}")
        elif self._incident is None:
            self._incident = next((i for i in status.incidents if i.seconds.total is not None), None)
            if self._incident is not None:
                self._screen.say(
                    f"  going on at step {(status.base_step or 0) + 1} in round {self._incident.round}, "
                    f"{self._incident.seconds.total:.2f} s after the kill; {self._incident.lost_steps} steps come again"
                )


def _kill(victim: WorkerStatus, round_number: int) -> Kill | None:
    """SIGKILL; None when it was gone already."""
    if victim.pid is None or victim.rank is None:
        return None
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Kill(rank=victim.rank, pid=victim.pid, step=victim.step or 0, round=round_number)
