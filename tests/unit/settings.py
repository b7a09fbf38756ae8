"""How the tests of settings load them."""

from __future__ import annotations

from pathlib import Path

from elastic.config import JobConfig, load

ETCD = ["--rdzv-backend", "etcd3", "--rdzv-endpoint", "h1:2379", "--rdzv-id", "job"]


def job_file(text: str, name: str = "job.toml") -> str:
    Path(name).write_text(text)
    return name


def loaded(*argv: str, **environ: str) -> JobConfig:
    return load(argv, environ)
