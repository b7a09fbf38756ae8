"""`elasticd install` and `elasticd uninstall`: checks the job as `elasticd run` would, and says what to do next."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from elastic.config import below, load
from elastic.errors import ExitCode, UsageError
from elastic.service.install import Installer
from elastic.service.plan import JOBS, Job, job_name
from elastic.service.stamp import body

_PASSWORD = "ELASTICD_ETCD_PASSWORD"


def install(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises: UsageError, before anything is written where the job is wrong."""
    if options.job is None and not options.etcd:
        raise UsageError("nothing to install: name a JOB.toml, or --etcd")
    installer = Installer(root=options.root, dry_run=options.dry_run, say=print)
    root = None if options.root is None else options.root.resolve()
    job = None if options.job is None else read_job(options.job, options.user, environ, root)
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


def read_job(path: Path, user: str, environ: Mapping[str, str], root: Path | None) -> Job:
    """The job, checked where and with what the service will run it: PET_* variables of this shell do not count.

    `root` is the image's tree, None for this host. The password is the service's own affair. Raises: UsageError.
    """
    name = job_name(path)
    settings = {key: environ[key] for key in ("PATH", "PYTHONPATH", "PYTHON_EXEC") if key in environ}
    if root is not None:  # an image has its own programs and its own Python, whose modules are not known here
        found = settings.get("PATH", os.defpath).split(os.pathsep)
        settings |= {"PATH": os.pathsep.join(below(root, place) for place in found), "PYTHON_EXEC": "python"}
    config = load(["--config", str(path)], {**settings, _PASSWORD: ""}, root=root)
    checkpoint_dir, log_dir = (place and _inside(root, place) for place in (config.checkpoint_dir, config.log_dir))
    config = dataclasses.replace(config, checkpoint_dir=checkpoint_dir, log_dir=log_dir)
    return Job(
        name=name,
        text=body(path.read_text()),  # it may be the installed one
        config=config,
        user=user,
        program=tuple(_inside(root, argument) for argument in program()),
        directory=Path(_inside(root, str(Path.cwd()))),
    )


def program() -> tuple[str, ...]:
    """The `elasticd` of the very environment that this runs in."""
    beside = Path(sys.executable).with_name("elasticd")
    return (str(beside),) if beside.exists() else (sys.executable, "-m", "elastic")


def _inside(root: Path | None, path: str) -> str:
    """As a program in the image sees what lies in its tree; others as they are."""
    return f"/{Path(path).relative_to(root)}" if root is not None and Path(path).is_relative_to(root) else path


def _say_what_is_next(job: Job) -> None:
    print("\nNext:")
    if job.config.etcd_user:
        print(f"  put {_PASSWORD}=... into {JOBS}/{job.name}.env, then")
    print(f"  systemctl enable --now {job.unit}")
    print(f"  journalctl -fu {job.unit}")
