"""Pure but for reading a run's files: what the two runs of the demo left behind -> what is right and what is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from elastic.demo.ledger import Audit, audit, read_ledger
from elastic.demo.settings import Settings
from elastic.status import Incident, IncidentSeconds

PHASES = tuple(field.name for field in dataclasses.fields(IncidentSeconds))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Whom the demo killed, and when: the last step it had seen, which the worker may have passed by one or two."""

    rank: int
    pid: int
    step: int
    round: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What one run left behind, in words of its folder."""

    audit: Audit
    losses: dict[int, float]  # step -> loss; of a repeated step the last
    digest: tuple[int, str] | None  # (step, sha256); None = it did not come to its end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything the demo has found out."""

    settings: Settings
    kill: Kill
    incident: Incident | None
    disturbed: RunFiles
    reference: RunFiles
    seconds: float  # that the demo took

    @property
    def digest_equal(self) -> bool:
        """Both runs came to the end, at the same parameters, bit by bit."""
        ends = self.disturbed.digest, self.reference.digest
        return ends[0] is not None and ends[0][0] == self.settings.steps and ends[0] == ends[1]

    def faults(self) -> list[str]:
        """What is wrong, in words; empty = all is right."""
        found = []
        for name, run in (("with the kill", self.disturbed), ("without it", self.reference)):
            if run.digest is None or run.digest[0] != self.settings.steps:
                found.append(f"the run {name} did not come to step {self.settings.steps}")
            found += [f"the run {name}: {fault}" for fault in _audit_faults(run.audit)]
        if self.incident is None or self.incident.seconds.total is None:
            found.append("the agent told of no recovery after the kill")
        if not self.digest_equal:
            found.append("the parameters differ from those of the run without the kill")
        return found

    def to_json(self) -> dict[str, Any]:
        """For scripts; `right` is what the exit code says."""
        counts, losses = self.disturbed.audit, self.disturbed.losses
        faults = self.faults()
        return {
            "right": not faults,
            "faults": faults,
            "workers": self.settings.workers,
            "steps": self.settings.steps,
            "loss": {"first": losses.get(1), "last": losses.get(self.settings.steps)},
            "killed": dataclasses.asdict(self.kill),
            "recovery_seconds": dataclasses.asdict(self.incident.seconds) if self.incident else None,
            "steps_repeated": len(counts.repeated_steps),
            "samples": {
                "expected": counts.expected,
                "used": counts.used,
                "lost": counts.lost,
                "doubled": counts.doubled,
            },
            "digest": self.disturbed.digest[1] if self.disturbed.digest else None,
            "digest_without_kill": self.reference.digest[1] if self.reference.digest else None,
            "digest_equal": self.digest_equal,
            "seconds": round(self.seconds, 2),
        }


def _audit_faults(found: Audit) -> list[str]:
    counts = ((found.lost, "lost"), (found.doubled, "used more than once"), (found.strange, "used but not planned"))
    words = [f"{count} samples were {what}" for count, what in counts if count]
    if found.wrong_steps:
        words.append(
            f"{len(found.wrong_steps)} steps used other samples than planned, the first is {found.wrong_steps[0]}"
        )
    return words


def read_run(folder: Path, settings: Settings) -> RunFiles:
    """Look through what a run has left; a file that is not there counts as empty."""
    ledger = read_ledger(_text(folder / "ledger.jsonl"))
    return RunFiles(
        audit=audit(ledger.entries, settings.plan()),
        losses=read_losses(_text(folder / "losses.jsonl")),
        digest=_parse_digest(_text(folder / "digest")),
    )


def read_losses(text: str) -> dict[int, float]:
    """step -> loss; a line cut off by a kill is passed over."""
    losses = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            losses[int(record["step"])] = float(record["loss"])
        except (ValueError, KeyError, TypeError):
            continue
    return losses


def last_loss(path: Path) -> float | None:
    """The newest loss of a run that is still going on."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 400))
            losses = read_losses(file.read().decode(errors="replace"))
    except OSError:
        return None
    return list(losses.values())[-1] if losses else None


def _parse_digest(text: str) -> tuple[int, str] | None:
    step, _, digest = text.strip().partition(" ")
    return (int(step), digest) if step.isdigit() and digest else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
