"""`elasticd install` and `elasticd uninstall`: checks the job as `elasticd run` would, and says what to do next."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from elastic.config import load
from elastic.errors import ExitCode, UsageError
from elastic.service.install import Installer
from elastic.service.plan import JOBS, Job, job_name
from elastic.service.stamp import body

_PASSWORD = "ELASTICD_ETCD_PASSWORD"


def install(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises: UsageError, before anything is written where the job is wrong."""
    if options.job is None and not options.etcd:
        raise UsageError("nothing to install: name a JOB.toml, or --etcd")
    job = None if options.job is None else read_job(options.job, options.user, environ)
    installer = Installer(root=options.root, dry_run=options.dry_run, say=print)
    if options.etcd:
        installer.install_etcd()
        print(f"\nNext: fill in {JOBS}/etcd.env and put the certificates that it names there, on three hosts; then")
        print("  systemctl enable --now elasticd-etcd")
    if job is not None:
        installer.install(job)
        _say_what_is_next(job)
    return int(ExitCode.SUCCEEDED)


def uninstall(options: argparse.Namespace) -> int:
    """Raises: UsageError."""
    path = Path(options.job)
    name = job_name(path if path.suffix == ".toml" else Path(f"{options.job}.toml"))
    Installer(root=options.root, dry_run=options.dry_run, say=print).uninstall(name)
    return int(ExitCode.SUCCEEDED)


def read_job(path: Path, user: str, environ: Mapping[str, str]) -> Job:
    """The job, checked where and with what the service will run it: PET_* variables of this shell do not count.

    The password is the service's own affair. Raises: UsageError.
    """
    name = job_name(path)
    settings = {key: environ[key] for key in ("PATH", "PYTHONPATH", "PYTHON_EXEC") if key in environ}
    config = load(["--config", str(path)], {**settings, _PASSWORD: ""})
    return Job(
        name=name,
        text=body(path.read_text()),  # it may be the installed one
        config=config,
        user=user,
        program=program(),
        directory=Path.cwd(),
    )


def program() -> tuple[str, ...]:
    """The `elasticd` of the very environment that this runs in."""
    beside = Path(sys.executable).with_name("elasticd")
    return (str(beside),) if beside.exists() else (sys.executable, "-m", "elastic")


def _say_what_is_next(job: Job) -> None:
    print("\nNext:")
    if job.config.etcd_user:
        print(f"  put {_PASSWORD}=... into {JOBS}/{job.name}.env, then")
    print(f"  systemctl enable --now {job.unit}")
    print(f"  journalctl -fu {job.unit}")
