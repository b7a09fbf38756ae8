"""What was measured, and how it is shown: a table and a curve."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

HEADER = (
    f"{'':6} {'--- elasticd: s ---':^17} {'---- operations/node ----':^25} {'------- bytes/node -------':^27} "
    f"{'------- c10d: s -------':^24} {'ratio of':>9}\n"
    f"{'nodes':>6} {'join':>8} {'re-form':>8} {'join':>8} {'re-form':>8} {'renewed':>7} "
    f"{'own':>8} {'news':>8} {'round':>9} {'join':>12} {'re-form':>11} {'joins':>9}"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One fleet. Seconds are None where it was not within the limit; counts are totals over all nodes.

    See `Metered` for the counts' names.
    """

    nodes: int
    limit_seconds: float
    join_seconds: float | None = None
    form_seconds: float | None = None
    join_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    form_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def count(self, name: str) -> int:
        return self.join_counts.get(name, 0) + self.form_counts.get(name, 0)

    @property
    def own_bytes(self) -> int:
        """Sent and received, without what every node must be told: the round and the leader's news."""
        told = self.count("round_bytes") + self.count("news_bytes")
        return self.count("bytes_sent") + self.count("bytes_received") - told


def operations(counts: Mapping[str, int]) -> int:
    """Calls and watches; not the renewals of leases, which go by time, six in a ttl."""
    return sum(counts.get(name, 0) for name in ("reads", "writes", "grants", "revokes", "watches"))


def row(ours: Measured, theirs: Measured | None) -> str:
    """A line under `HEADER`."""
    n = ours.nodes
    line = (
        f"{n:6} {_seconds(ours.join_seconds, ours):>8} {_seconds(ours.form_seconds, ours):>8} "
        f"{operations(ours.join_counts) / n:8.1f} {operations(ours.form_counts) / n:8.1f} "
        f"{ours.count('renewals') / n:7.1f} {ours.own_bytes / n:8.0f} {ours.count('news_bytes') / n:8.0f} "
        f"{ours.count('round_bytes') / n:9.0f} "
    )
    if theirs is None:
        return f"{line}{'not tried':>12} {'-':>11} {'-':>9}"
    ratio = "-"
    if ours.join_seconds is not None and theirs.join_seconds is not None:
        ratio = f"{ours.join_seconds / theirs.join_seconds:.3f}"
    form = "-" if theirs.join_seconds is None else _seconds(theirs.form_seconds, theirs)
    return f"{line}{_seconds(theirs.join_seconds, theirs):>12} {form:>11} {ratio:>9}"


def _seconds(seconds: float | None, measured: Measured) -> str:
    return f"> {measured.limit_seconds:g} s" if seconds is None else f"{seconds:.2f}"


def curve(ours: Sequence[Measured], theirs: Sequence[Measured], path: Path) -> bool:
    """Seconds over nodes, both axes logarithmic. Returns False where matplotlib is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("matplotlib").setLevel(logging.ERROR)
            from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    lines = [
        ("elasticd, join", "C0o-", [(m.nodes, m.join_seconds) for m in ours]),
        ("elasticd, re-form without one", "C0s--", [(m.nodes, m.form_seconds) for m in ours]),
        ("c10d, join", "C3o-", [(m.nodes, m.join_seconds) for m in theirs]),
        ("c10d, re-form without one", "C3s--", [(m.nodes, m.form_seconds) for m in theirs]),
    ]
    for label, style, points in lines:
        known = [(nodes, seconds) for nodes, seconds in points if seconds is not None]
        if known:
            axes.loglog(*zip(*known, strict=True), style, label=label, markersize=4)
    for late in (m for m in theirs if m.join_seconds is None):
        axes.loglog([late.nodes], [late.limit_seconds], "C3^", label=f"c10d: not within {late.limit_seconds:g} s")
    whole = [m for m in ours if m.join_seconds is not None]
    if whole:
        last = whole[-1]
        linear = [(last.join_seconds or 0.0) * m.nodes / last.nodes for m in whole]
        axes.loglog([m.nodes for m in whole], linear, "k:", linewidth=0.8, label="linear")
    axes.set(xlabel="simulated nodes", ylabel="seconds until all have seen the round", title="One etcd, one host")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
