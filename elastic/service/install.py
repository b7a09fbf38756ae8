"""Puts a job's files into place, or takes them out again, and tells each thing that it does.

Nothing that somebody has edited is overwritten or removed. Works on the host, or on the tree of an image (`root`),
where no program is run.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from elastic.errors import UsageError
from elastic.service import plan
from elastic.service.plan import File, Job
from elastic.service.stamp import State, is_intact, stamped, state
from elastic.systemctl import unit_of

NEW = ".elasticd-new"
_COMMAND_SECONDS = 200.0  # a stop may take as long as the drain


class Installer:
    """One install or uninstall. `say` gets a line for each thing done; with `dry_run` for each that would be."""

    def __init__(self, *, root: Path | None, dry_run: bool, say: Callable[[str], None]) -> None:
        """`root` None: this host. Raises: UsageError where this user may not."""
        self._root = root
        self._dry_run = dry_run
        self._say = say
        if root is None and not dry_run and os.geteuid() != 0:
            raise UsageError("this writes below /etc: run it as root (sudo), or with --dry-run to see what it would do")
        if root is not None and not root.is_dir():
            raise UsageError(f"--root {root} is not a directory")

    def install(self, job: Job) -> None:
        """Raises: UsageError."""
        if self._root is None:
            _check_user(job.user)
        self._say_if_dry()
        changed = self._write((*plan.shared_files(), *plan.files_of(job)))
        self._run("systemd-sysusers", str(plan.SYSUSERS), needed=changed)
        self._run("systemd-tmpfiles", "--create", str(plan.TMPFILES), needed=changed)
        self._run("systemctl", "daemon-reload", needed=changed)
        for directory in job.writable:
            self._make(directory, job.user)
        if self._root is None:
            for path in (Path(job.program[0]), job.directory, *job.readable, *job.writable):
                self._warn_if_closed(path, job.user)
                if is_private(path):
                    self._say(
                        f"WARNING: the service will not find {path}: it has a directory for temporary files of its own "
                        "(PrivateTmp=yes). Move it, or set PrivateTmp=no with `systemctl edit`"
                    )
            for paths, bits, what in ((job.readable, os.R_OK, "read"), (job.writable, os.W_OK | os.X_OK, "write to")):
                for path in paths:
                    if not may(path, job.user, bits):
                        self._say(f"WARNING: user {job.user} cannot {what} {path}: chown or chgrp it, or choose --user")

    def install_etcd(self) -> None:
        """The example of an etcd. Raises: UsageError."""
        self._say_if_dry()
        changed = self._write(plan.etcd_files())
        self._run("systemd-sysusers", str(plan.ETCD_SYSUSERS), needed=changed)
        self._run("systemctl", "daemon-reload", needed=changed)

    def uninstall(self, name: str) -> None:
        """Raises: UsageError when there is no such job."""
        self._say_if_dry()
        unit = unit_of(name)
        drop_ins = plan.UNITS / f"{unit}.d"
        own = [drop_ins / "10-job.conf", plan.JOBS / f"{name}.toml", plan.JOBS / f"{name}.env"]
        if not any(self._place(path).exists() for path in own):
            raise UsageError(f"no job {name!r} is installed here; there are: {', '.join(self._names()) or 'none'}")
        self._run("systemctl", "disable", "--now", unit, needed=True)
        self._remove(own)
        if not self._dry_run:
            with contextlib.suppress(OSError):  # a drop-in of the user's is in it
                self._place(drop_ins).rmdir()
        if set(self._names()) <= {name}:
            self._remove([file.path for file in plan.shared_files()])
        self._run("systemctl", "daemon-reload", needed=True)
        self._say(f"left  /var/lib/elasticd/{name}, /var/cache/elasticd/{name}, /var/log/elasticd/{name}, checkpoints")

    def _say_if_dry(self) -> None:
        if self._dry_run:
            self._say("a dry run: nothing is written, this is what would be:")

    def _names(self) -> list[str]:
        folders = self._place(plan.UNITS).glob("elasticd@?*.service.d")
        return sorted(folder.name.removeprefix("elasticd@").removesuffix(".service.d") for folder in folders)

    def _place(self, path: Path) -> Path:
        return path if self._root is None else self._root / path.relative_to("/")

    def _write(self, files: Iterable[File]) -> bool:
        """Whether anything has changed, or would."""
        changed = False
        for file in files:
            place = self._place(file.path)
            found = state(_read(place), file.text)
            changed |= found in (State.MISSING, State.OLD)
            if found is State.SAME:
                self._say(f"same  {place}")
            elif found is State.EDITED:
                beside = place.with_name(place.name + NEW)
                self._say(f"kept  {place}: it was edited; ours is beside it: mv {beside} {place}")
                self._put(beside, file)
            else:
                self._say(f"{'wrote' if found is State.MISSING else 'new  '} {place}")
                self._put(place, file)
        return changed

    def _put(self, place: Path, file: File) -> None:
        if self._dry_run:
            for line in stamped(file.text).splitlines():
                self._say(f"      | {line}".rstrip())
            return
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file.mode)
            with os.fdopen(descriptor, "w") as out:
                os.fchmod(descriptor, file.mode)  # whatever the umask
                out.write(stamped(file.text))
                out.flush()
                os.fsync(descriptor)
            partial.replace(place)
        except OSError as exc:
            partial.unlink(missing_ok=True)
            raise UsageError(f"cannot write {place}: {exc.strerror or exc}") from exc

    def _remove(self, paths: Sequence[Path]) -> None:
        for place in map(self._place, paths):
            found = _read(place)
            if found is None:
                continue
            if not is_intact(found):
                self._say(f"kept  {place}: it was edited; remove it yourself")
                continue
            if not self._dry_run:
                place.unlink()
            self._say(f"gone  {place}")

    def _make(self, directory: Path, user: str) -> None:
        place = self._place(directory)
        if place.exists():
            return
        self._say(f"made  {place}")
        if not self._dry_run:
            try:
                place.mkdir(parents=True, mode=0o750)
                if self._root is None:
                    shutil.chown(place, user)
            except (OSError, LookupError) as exc:
                raise UsageError(f"cannot make {place} for user {user}: {exc}") from exc

    def _run(self, *command: str, needed: bool) -> None:
        if not needed:
            return
        if self._root is not None or self._dry_run:
            self._say(f"to do {' '.join(command)}")
            return
        if not Path("/run/systemd/system").is_dir():
            return
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise UsageError(f"{' '.join(command)}: {exc}") from exc
        if done.returncode:
            raise UsageError(f"{' '.join(command)} failed: {done.stderr.strip() or f'exit {done.returncode}'}")
        self._say(f"ran   {' '.join(command)}")

    def _warn_if_closed(self, path: Path, user: str) -> None:
        closed = first_closed(path, user)
        if closed is not None:
            self._say(f"WARNING: user {user} cannot enter {closed}, on the way to {path}: open it, or choose --user")


def is_private(path: Path) -> bool:
    """Whether it lies where a service with PrivateTmp=yes has directories of its own."""
    return any(path.is_relative_to(place) for place in ("/tmp", "/var/tmp"))


def _check_user(user: str) -> None:
    """Raises: UsageError for one whom nobody knows; the default one is made with the service."""
    with contextlib.suppress(KeyError):
        pwd.getpwnam(user)
        return
    if user != plan.DEFAULT_USER:
        raise UsageError(f"--user {user}: there is no such user on this host; make it first (useradd --system {user})")


def may(path: Path, user: str, bits: int) -> bool:
    """Whether the mode of what is there lets `user` do that (os.R_OK ...); True also where nothing is known."""
    try:
        account = pwd.getpwnam(user)
        found = path.stat()
    except (KeyError, OSError):
        return True
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    shift = 6 if found.st_uid == account.pw_uid else 3 if found.st_gid in groups else 0
    return not account.pw_uid or found.st_mode >> shift & bits == bits


def first_closed(path: Path, user: str) -> Path | None:
    """The first directory on the way to `path` that its mode keeps `user` out of; None also where nothing is known."""
    return next((place for place in reversed(path.absolute().parents) if not may(place, user, os.X_OK)), None)


def _read(place: Path) -> str | None:
    """Raises: UsageError for what cannot be read."""
    try:
        return place.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"cannot read {place}: {exc}") from exc
