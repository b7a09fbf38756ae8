"""The demo's last word: a table for people."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from elastic.demo.ledger import Audit
from elastic.demo.outcome import PHASES, Outcome
from elastic.status import plural


def table(outcome: Outcome) -> Table:
    """Steps, loss, recovery, samples and the comparison with the run that was left in peace."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("training on real text, one worker killed")
    made.add_column("", justify="right")
    settings, kill, losses = outcome.settings, outcome.kill, outcome.disturbed.losses
    counts = outcome.disturbed.audit
    made.add_row("steps", f"{settings.steps} on {plural(settings.workers, 'worker')}")
    made.add_row(
        "loss, first and last step", f"{loss_words(losses.get(1))} -> {loss_words(losses.get(settings.steps))}"
    )
    made.add_row("killed by SIGKILL", f"rank {kill.rank} at step {kill.step}", end_section=True)
    seconds = outcome.incident.seconds if outcome.incident else None
    for phase in PHASES:
        value = getattr(seconds, phase, None)
        words = "recovery, kill to first new step" if phase == "total" else f"  {_PHASE_WORDS[phase]}"
        made.add_row(words, "-" if value is None else f"{value:.3f} s", end_section=phase == "total")
    made.add_row("steps repeated", repeated_words(counts))
    for name in ("expected", "used", "lost", "doubled"):
        made.add_row(f"samples {name}", f"{getattr(counts, name):,}", end_section=name == "doubled")
    equal = Text("yes", "bold green") if outcome.digest_equal else Text("no", "bold red")
    made.add_row("parameters equal, bit by bit, to a run without the kill", equal)
    return made


_PHASE_WORDS = {
    "detect": "detect the failure",
    "stop": "stop the others",
    "rendezvous": "agree on a new round",
    "start": "start the workers",
    "restore": "restore the checkpoint",
    "first_step": "first step",
}


def loss_words(value: float | None) -> str:
    """`-` where it is not known."""
    return "-" if value is None else f"{value:.3f}"


def repeated_words(counts: Audit) -> str:
    """How many, and from where to where."""
    steps = counts.repeated_steps
    return f"{len(steps)} ({steps[0]} to {steps[-1]})" if steps else "0"
