"""Fixtures of the unit tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script in it, and no settings in the process's own environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_text("")
    return tmp_path
