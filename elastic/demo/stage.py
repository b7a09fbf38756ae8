"""Looks on while agents train, shows how far they are, and lets the demo act at the right moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic.demo.job import Job
from elastic.demo.outcome import last_loss
from elastic.demo.screen import Moved, Screen
from elastic.demo.settings import Settings
from elastic.errors import ElasticError
from elastic.status import JobStatus

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 120.0  # without any news of a run: a slow machine needs a while to import torch

Act = Callable[[JobStatus], None]  # called at each look


class DemoFailedError(ElasticError):
    """A run could not be brought to its end."""


class InterruptedDemoError(ElasticError):
    """Somebody wants us to stop."""


class Run(Protocol):
    """One agent, or several that train together."""

    folder: Path

    @property
    def is_over(self) -> bool: ...

    def status(self) -> JobStatus | None: ...

    def last_words(self) -> str: ...

    def stop(self) -> None: ...


class Stage:
    """Where runs take place, one after the other so that each has the machine to itself."""

    def __init__(self, settings: Settings, screen: Screen, folder: Path, signals: list[int]) -> None:
        self.settings, self.screen, self.folder, self._signals = settings, screen, folder, signals

    def train_alone(self, name: str, act: Act | None = None) -> None:
        """A run of one agent from start to end. Raises: DemoFailedError when it does not end well."""
        job = Job(self.settings.command(self.folder / name, in_peace=act is None), self.folder / name)
        self.watch(job, act)
        if job.exit_code != 0:
            raise DemoFailedError(f"the agent ended with {job.exit_code}:\n{job.last_words()}")

    def watch(self, run: Run, act: Act | None = None) -> None:
        """Look on until the run is over; nothing of it is left afterwards. Raises: DemoFailedError."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(run.stop)
            moved = stack.enter_context(self.screen.progress(self.settings.steps))
            self._follow(run, moved, act)
        self.screen.say(f"  {self.settings.steps} steps done in {time.monotonic() - began:.1f} s")

    def _follow(self, run: Run, moved: Moved, act: Act | None) -> None:
        seen: tuple[object, ...] = ()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not run.is_over:
            if self._signals:
                raise InterruptedDemoError(f"signal {self._signals[0]}")
            if time.monotonic() >= deadline:
                raise DemoFailedError(f"no news of the run for {_PATIENCE_SECONDS:.0f} s:\n{run.last_words()}")
            status = run.status()
            if status is not None:
                steps = [worker.step or 0 for worker in status.workers]
                if seen != (news := (status.state, status.round, *steps)):
                    seen, deadline = news, time.monotonic() + _PATIENCE_SECONDS
                moved(min(steps, default=0), last_loss(run.folder / "losses.jsonl"), status.state)
                if act is not None:
                    act(status)
            time.sleep(_LOOK_SECONDS)
