"""The last word of the demo of many nodes: a table for people."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from elastic.demo import timeline
from elastic.demo.nodes_outcome import Change, Kind, NodesOutcome
from elastic.demo.parameters import TOLERANCE
from elastic.demo.report import loss_words, repeated_words
from elastic.demo.settings import LEASE_TTL_SECONDS
from elastic.status import plural


def nodes_table(outcome: NodesOutcome) -> Table:
    """Steps, loss, world sizes, what each change cost, samples, and the comparison with the run left in peace."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("training on real text: a node killed, added, one drained")
    made.add_column("", justify="right")
    settings, files = outcome.settings, outcome.disturbed.files
    made.add_row("steps", f"{settings.steps} on {plural(settings.nodes, 'node')} of {plural(settings.workers, 'rank')}")
    first, last = files.losses.get(1), files.losses.get(settings.steps)
    made.add_row("loss, first and last step", f"{loss_words(first)} -> {loss_words(last)}", end_section=True)
    _add_world_sizes(made, outcome)
    for change in outcome.changes:
        _add_change(made, outcome, change)
    counts = files.audit
    made.add_row("steps repeated", repeated_words(counts))
    for name in ("expected", "used", "lost", "doubled"):
        made.add_row(f"samples {name}", f"{getattr(counts, name):,}", end_section=name == "doubled")
    _add_comparison(made, outcome)
    return made


def _add_world_sizes(made: Table, outcome: NodesOutcome) -> None:
    lines = timeline.in_words(outcome.disturbed.stretches)
    for number, line in enumerate(lines, start=1):
        made.add_row("world size" if number == 1 else "", line, end_section=number == len(lines))


def _add_change(made: Table, outcome: NodesOutcome, change: Change) -> None:
    title, from_what = _CHANGES[change.kind]
    cost = outcome.cost(change)
    made.add_row(f"{title.format(change.node_id)} at step {change.step}", "")
    made.add_row(f"  {from_what} to first step with {plural(change.world_size, 'rank')}", _seconds(cost.seconds))
    made.add_row("  pause between two steps", _seconds(cost.pause_seconds))
    if change.was_cold:
        made.add_row("  a standby was still cold: a worker's cold start is in this", "")
    made.add_row("  steps done again", str(cost.repeated_steps), end_section=True)


_CHANGES = {
    Kind.LOST: (f"node {{}} killed by SIGKILL (lease {LEASE_TTL_SECONDS} s)", "kill"),
    Kind.JOINED: ("node {} started again", "start of its agent"),
    Kind.LEFT: ("node {} drained by SIGTERM", "signal"),
}


def _add_comparison(made: Table, outcome: NodesOutcome) -> None:
    """What is equal to the run in peace, and how equal."""
    ranks = outcome.settings.world_size
    right = not (outcome.disturbed.files.audit.wrong_steps or outcome.reference.files.audit.wrong_steps)
    made.add_row(f"samples of every step: those of a run in peace, {plural(ranks, 'rank')}", _yes(right))
    apart = "-" if outcome.difference is None else f"{outcome.difference:.1e}"
    made.add_row("  largest relative difference of a tensor", apart)
    made.add_row(f"parameters equal to rounding (at most {TOLERANCE:.0e})", _yes(outcome.parameters_close))
    made.add_row("  bit by bit (not asked for: sums in another order)", "yes" if outcome.digest_equal else "no")


def _yes(is_right: bool) -> Text:
    return Text("yes", "bold green") if is_right else Text("no", "bold red")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
