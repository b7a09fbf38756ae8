"""How the tests of settings load them."""

from __future__ import annotations

from pathlib import Path

from elastic.config import JobConfig, load


def job_file(text: str, name: str = "job.toml") -> str:
    Path(name).write_text(text)
    return name


def loaded(*argv: str, **environ: str) -> JobConfig:
    return load(argv, environ)
