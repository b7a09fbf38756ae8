"""Findings as people and programs read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import IO

from elastic.checks.finding import Finding
from elastic.errors import ExitCode

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """Warnings do not count: a node that trains badly is still one that trains."""
    return ExitCode.FAILED if any(finding.state == "error" for finding in findings) else ExitCode.SUCCEEDED


def as_json(findings: Sequence[Finding]) -> str:
    """A list of {check, state, message, remedy}."""
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1)


def print_text(findings: Sequence[Finding], file: IO[str]) -> None:
    """A line each, what to do below it, the sum at the end; in colours on a terminal alone."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False, soft_wrap=True)
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        style = _STYLES[finding.state]
        console.print(Text.assemble((f"{finding.state:<7}", style), f"  {finding.check:<{width}}  {finding.message}"))
        if finding.remedy:
            console.print(Text(f"{'':<{width + 11}}-> {finding.remedy}"))
    console.print(Text(summary(findings)))


def summary(findings: Sequence[Finding]) -> str:
    """Such as `this node is fit to train: 20 ok, 1 warning, 0 errors`."""
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
    verdict = "is not fit to train" if counts["error"] else "is fit to train"
    warnings = f"{counts['warning']} warning{'s' * (counts['warning'] != 1)}"
    return f"this node {verdict}: {counts['ok']} ok, {warnings}, {counts['error']} error{'s' * (counts['error'] != 1)}"
