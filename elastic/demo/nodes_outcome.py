"""Pure but for reading a run's files: what the demo of many nodes has left behind -> what is right and what is not."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

from elastic.demo import timeline
from elastic.demo.ledger import read_ledger
from elastic.demo.outcome import RunFiles, audit_faults, read_run, read_text_file
from elastic.demo.parameters import TOLERANCE, read_difference
from elastic.demo.settings import Settings
from elastic.demo.timeline import Stretch
from elastic.status import plural


class Kind(enum.Enum):
    """What happens to the nodes, in this order."""

    LOST = "lost"
    JOINED = "joined"
    LEFT = "left"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the demo did to a node, and the round that came of it."""

    kind: Kind
    node_id: str
    step: int  # the last one seen before
    unix_time: float  # just before it was done
    round: int
    world_size: int  # of that round
    was_cold: bool = False  # a standby was not warm yet; not looked at where a node joins, whose start takes longer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a change cost the nodes that stayed."""

    pause_seconds: float | None  # from their last step before it to their next one
    seconds: float | None  # from the change (the kill, the start, the signal) to that next step
    repeated_steps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesRun:
    """One run's files, and its rounds."""

    files: RunFiles
    stretches: tuple[Stretch, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesOutcome:
    """Everything the demo has found out."""

    settings: Settings
    changes: tuple[Change, ...]  # one of each kind
    disturbed: NodesRun
    reference: NodesRun
    difference: float | None  # of the parameters at the end (see `parameters`); None = there are none to compare
    seconds: float  # that the demo took

    @property
    def digest_equal(self) -> bool:
        """Bit by bit: not promised where the world size changes, and not asked for."""
        ends = self.disturbed.files.digest, self.reference.files.digest
        return ends[0] is not None and ends[0] == ends[1]

    @property
    def parameters_close(self) -> bool:
        """No tensor differs by more than rounding explains."""
        return self.difference is not None and self.difference <= TOLERANCE

    def cost(self, change: Change) -> Cost:
        """From the files of the run: what rank 0 wrote when it had applied a step."""
        found = self.disturbed.stretches
        began = timeline.began_at(found, change.round)
        return Cost(
            pause_seconds=timeline.pause_seconds(found, change.round),
            seconds=None if began is None else began - change.unix_time,
            repeated_steps=timeline.repeated_steps(found, change.round),
        )

    def faults(self) -> list[str]:
        """What is wrong, in words; empty = all is right."""
        found = []
        for name, run in (("disturbed run", self.disturbed.files), ("run in peace", self.reference.files)):
            if run.digest is None or run.digest[0] != self.settings.steps:
                found.append(f"the {name} did not come to step {self.settings.steps}")
            found += [f"the {name}: {fault}" for fault in audit_faults(run.audit)]
        for kind in Kind:
            found += self._change_faults(kind)
        if self.difference is None:
            found.append("there are no parameters of both runs to compare")
        elif not self.parameters_close:
            found.append(f"a tensor of the parameters differs by {self.difference:.1e}, more than {TOLERANCE:.0e}")
        return found

    def _change_faults(self, kind: Kind) -> list[str]:
        change = next((change for change in self.changes if change.kind is kind), None)
        if change is None:
            return [f"no node {kind.value}"]
        ranks = next((s.ranks for s in self.disturbed.stretches if s.round >= change.round), 0)
        cost, words = self.cost(change), f"after node {change.node_id} {_WORDS[kind]}"
        found = []
        if ranks != change.world_size:
            found.append(f"{words} {plural(ranks, 'rank')} trained, not {change.world_size}")
        if cost.seconds is None:
            found.append(f"{words} no step was told of")
        if kind is not Kind.LOST and cost.repeated_steps:
            found.append(f"{words} {plural(cost.repeated_steps, 'step')} came again; none should have")
        return found

    def to_json(self) -> dict[str, Any]:
        """For scripts; `right` is what the exit code says."""
        files, faults = self.disturbed.files, self.faults()
        counts = files.audit
        return {
            "right": not faults,
            "faults": faults,
            "nodes": self.settings.nodes,
            "workers": self.settings.workers,
            "steps": self.settings.steps,
            "loss": {"first": files.losses.get(1), "last": files.losses.get(self.settings.steps)},
            "rounds": [dataclasses.asdict(stretch) for stretch in self.disturbed.stretches],
            "changes": [
                {**dataclasses.asdict(c), "kind": c.kind.value, **dataclasses.asdict(self.cost(c))}
                for c in self.changes
            ],
            "steps_repeated": len(counts.repeated_steps),
            "samples": {name: getattr(counts, name) for name in ("expected", "used", "lost", "doubled")},
            "parameters": {"difference": self.difference, "tolerance": TOLERANCE, "close": self.parameters_close},
            "digest_equal": self.digest_equal,
            "seconds": round(self.seconds, 2),
        }


_WORDS = {Kind.LOST: "was killed", Kind.JOINED: "came back", Kind.LEFT: "left"}


def read_nodes_run(folder: Path, settings: Settings) -> NodesRun:
    """Look through what a run has left; a file that is not there counts as empty."""
    entries = read_ledger(read_text_file(folder / "ledger.jsonl")).entries
    losses = read_text_file(folder / "losses.jsonl")
    return NodesRun(files=read_run(folder, settings), stretches=timeline.stretches(entries, losses))


def read_parameter_difference(disturbed: Path, reference: Path) -> float | None:
    """Of the runs in these folders."""
    name = "parameters.safetensors"
    return read_difference(disturbed / name, reference / name)
