"""What the demo shows while it runs: one line moving in place on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Moved = Callable[[int, float | None, str], None]  # step, loss, state of the job

_REDRAW_SECONDS = 0.1
_FILE_WIDTH = 120


class Screen:
    """Says what happens. Markup in what is said is left alone: it may hold anybody's log lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        if not console.is_terminal:  # a file is as wide as the table is
            console.width = max(console.width, _FILE_WIDTH)

    def say(self, text: str, *, style: str | None = None) -> None:
        """One thing that happened; above the line that moves, if there is one."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Moved]:
        """Show steps as they come, until the block ends."""
        if not self.console.is_terminal:
            yield self._plain(total)
            return
        columns = (TextColumn("  step {task.completed} of {task.total}"), BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("starting", total=total)
            drawn = 0.0

            def moved(step: int, loss: float | None, state: str) -> None:
                nonlocal drawn
                if (now := time.monotonic()) - drawn >= _REDRAW_SECONDS:
                    drawn = now
                    is_running = state == "running"
                    words = f"loss {loss:.2f}" if is_running and loss is not None else state
                    bar.update(task, completed=step if is_running else None, description=words, refresh=True)

            yield moved

    def _plain(self, total: int) -> Moved:
        """A line for each quarter; steps that come again after a kill are not told again."""
        told = 0

        def moved(step: int, loss: float | None, state: str) -> None:
            nonlocal told
            quarter = 4 * step // total
            if loss is not None and told < quarter < 4:
                told = quarter
                self.say(f"  step {step} of {total}, loss {loss:.2f}")

        return moved
