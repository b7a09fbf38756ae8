"""The agent under systemd says when a stop would be cut short."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from elastic.agent.stop_timeout import own_unit, warn_if_short
from elastic.config import JobConfig
from elastic.systemctl import parse_timespan, stop_timeout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2min 30s", 150.0), ("90s", 90.0), ("1h 500ms", 3600.5), ("infinity", math.inf), ("", None), ("soon", None)],
)
def test_timespans_are_read_as_systemctl_writes_them(text: str, seconds: float | None) -> None:
    assert parse_timespan(text) == seconds


@pytest.mark.parametrize(
    ("lines", "unit"),
    [
        ("0::/elasticd.slice/elasticd@a-b.service", "elasticd@a-b.service"),
        ("4:memory:/x.service\n1:name=systemd:/elasticd.slice/elasticd@j.service\n0::/\n", "elasticd@j.service"),
        ("0::/user.slice/session-1.scope", ""),
    ],
)
def test_the_unit_is_found_in_either_version_of_cgroups(tmp_path: Path, lines: str, unit: str) -> None:
    (tmp_path / "cgroup").write_text(lines)
    assert own_unit(tmp_path / "cgroup") == unit
    assert own_unit(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("told", "warns"), [("1min 30s", True), ("2min", True), ("2min 30s", False), ("infinity", False)]
)
def test_a_stop_timeout_that_is_not_above_the_grace_is_warned_of_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: str, warns: bool
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho LoadState=loaded\necho 'TimeoutStopUSec={told}'\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    warn_if_short(JobConfig(script="x", drain_grace_seconds=120.0), "elasticd@j.service")
    assert bool(caplog.records) is warns
    if warns:
        assert "--drain-grace 120 s" in caplog.text
        assert "TimeoutStopSec=" in caplog.text


def test_a_unit_that_systemd_does_not_know_has_no_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stop_timeout("elasticd@j.service") is None, "no systemctl"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho LoadState=not-found\necho 'TimeoutStopUSec=1min 30s'\n")
    systemctl.chmod(0o755)
    assert stop_timeout("elasticd@j.service") is None
