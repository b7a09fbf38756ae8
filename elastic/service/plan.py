"""Pure: a job and who is to run it -> the files that make it a service of systemd.

The template unit holds what is the same for all jobs; a drop-in what depends on this one: the program, its user, where
it runs and may write, and how long a stop may take.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from elastic.config import JobConfig
from elastic.errors import UsageError
from elastic.systemctl import stop_seconds, unit_of

UNITS = Path("/etc/systemd/system")
JOBS = Path("/etc/elasticd")
SYSUSERS = Path("/etc/sysusers.d/elasticd.conf")
TMPFILES = Path("/etc/tmpfiles.d/elasticd.conf")
ETCD_SYSUSERS = Path("/etc/sysusers.d/elasticd-etcd.conf")

DEFAULT_USER = "elasticd"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file to be there, by its path on the host."""

    path: Path
    text: str
    mode: int = 0o644


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is installed."""

    name: str
    text: str  # the job file's
    config: JobConfig
    user: str
    program: tuple[str, ...]  # `elasticd`, as it was called
    directory: Path  # where relative paths of the job file begin

    @property
    def unit(self) -> str:
        return unit_of(self.name)

    @property
    def writable(self) -> tuple[Path, ...]:
        """Local directories that the job writes into."""
        named = (self.config.checkpoint_dir, self.config.log_dir)
        return tuple(Path(name) for name in named if name and "://" not in name)

    @property
    def readable(self) -> tuple[Path, ...]:
        """Files that its user must be able to read."""
        config = self.config
        script = None if config.module or config.no_python else str(self.directory / config.script)
        keys = (config.etcd_ca, config.etcd_cert, config.etcd_key, config.http_cert, config.http_key)
        return tuple(Path(name) for name in (script, config.http_token_file, *keys) if name)


def job_name(path: Path) -> str:
    """The instance's name, from the job file's. Raises: UsageError."""
    name = path.name.removesuffix(".toml")
    if path.suffix != ".toml" or not _NAME.fullmatch(name):
        raise UsageError(
            f"job file {path}: its name becomes that of the service; call it NAME.toml, with letters, digits, _ . and -"
        )
    if name == "etcd":
        raise UsageError(f"job file {path}: {JOBS}/etcd.env is for elasticd-etcd.service; give the job another name")
    return name


def files_of(job: Job) -> tuple[File, ...]:
    """Those of this job alone."""
    return (
        File(path=UNITS / f"{job.unit}.d" / "10-job.conf", text=_drop_in(job)),
        File(path=JOBS / f"{job.name}.toml", text=job.text),
        File(path=JOBS / f"{job.name}.env", text=_shipped("elasticd.env.example"), mode=0o600),
    )


def shared_files() -> tuple[File, ...]:
    """Those that all jobs of a host share."""
    return (
        File(path=UNITS / "elasticd@.service", text=_shipped("elasticd@.service")),
        File(path=UNITS / "elasticd.slice", text=_shipped("elasticd.slice")),
        File(path=SYSUSERS, text=_shipped("elasticd.sysusers")),
        File(path=TMPFILES, text=_shipped("elasticd.tmpfiles")),
    )


def etcd_files() -> tuple[File, ...]:
    """The example of a small etcd, to be filled in."""
    return (
        File(path=UNITS / "elasticd-etcd.service", text=_shipped("elasticd-etcd.service")),
        File(path=ETCD_SYSUSERS, text=_shipped("elasticd-etcd.sysusers")),
        File(path=JOBS / "etcd.env", text=_shipped("elasticd-etcd.env.example"), mode=0o600),
    )


def stop_timeout(config: JobConfig) -> int:
    """TimeoutStopSec of its unit."""
    return stop_seconds(config.stop_grace_seconds)


def _drop_in(job: Job) -> str:
    group = "Group=elasticd" if job.user == DEFAULT_USER else "Group="
    lines = [
        f"# What depends on job {job.name}; the rest is in elasticd@.service.",
        "[Service]",
        f"User={job.user}",
        group,
        "ExecStart=",
        f"ExecStart={command_line([*job.program, 'run', '--config'])} {JOBS}/%i.toml",
        "ExecStopPost=",
        f"ExecStopPost=-{command_line([*job.program, 'give-back'])}",
        f"WorkingDirectory={_escaped(str(job.directory))}",
        f"# drain_grace = {job.config.drain_grace_seconds:g} s, and some for what comes after it",
        f"TimeoutStopSec={stop_timeout(job.config)}s",
    ]
    if job.writable:
        lines.append(f"ReadWritePaths={command_line([f'-{path}' for path in job.writable])}")
    return "\n".join(lines) + "\n"


def command_line(arguments: Sequence[str]) -> str:
    """As systemd.syntax(7) and systemd.service(5) want them quoted."""
    return " ".join(_quoted(argument) for argument in arguments)


def _quoted(argument: str) -> str:
    text = _escaped(argument).replace("\\", "\\\\").replace("$", "$$")
    return text if re.fullmatch(r"[^\s\"';#]+", text) else '"' + text.replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    """Without specifiers."""
    return text.replace("%", "%%")


def _shipped(name: str) -> str:
    return (resources.files("elastic.service") / "units" / name).read_text()
