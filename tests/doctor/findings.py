"""How the tests of checks look at findings."""

from __future__ import annotations

from typing import Any

from elastic.checks.finding import Finding


def states(findings: Any) -> list[str]:
    return [finding.state for finding in findings]


def only(findings: Any) -> Finding:
    (finding,) = findings
    assert isinstance(finding, Finding)
    assert bool(finding.remedy) == (finding.state != "ok")
    return finding
