"""Where the agents of this host meet those who ask for them: one socket `<runtime directory>/<agent pid>.sock` each.

Owns the choice of the directory, its safety, and socket addresses; knows nothing of what is said through a socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from elastic.errors import UsageError

_SUN_PATH_BYTES = 107  # sockaddr_un.sun_path holds 108 bytes with its closing NUL
_SYSTEM_DIRECTORY = Path("/run/elasticd")


def closed_to_others(path: str, flags: int) -> int:
    """An `opener` for open(): what we write is for this user and group, whatever the umask allows."""
    return os.open(path, flags, 0o640)


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """The directory an agent puts its socket into; made if need be, owned by this user, closed to others.

    Raises: UsageError when none of the places can be used, with the reason for each.
    """
    reasons = []
    for candidate in _candidates(environ):
        try:
            return _prepare(candidate)
        except OSError as exc:
            reasons.append(f"{candidate}: {exc.strerror or exc}")
    raise UsageError(f"no runtime directory ({'; '.join(reasons)}); set RUNTIME_DIRECTORY to a directory of yours")


def socket_path(directory: Path, pid: int) -> Path:
    return directory / f"{pid}.sock"


def sockets(environ: Mapping[str, str]) -> list[Path]:
    """Sockets of agents in every place where one may have put it: a service's directory is not its caller's.

    Where RUNTIME_DIRECTORY is set it is the only place.
    """
    places = _candidates(environ)
    if not environ.get("RUNTIME_DIRECTORY"):
        places.append(_SYSTEM_DIRECTORY)
    found: list[Path] = []
    for directory in places:
        if _is_trusted(directory):
            with contextlib.suppress(OSError):
                found += sorted([*directory.glob("*.sock"), *directory.glob("*/*.sock")])
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for bind() or connect() that fits into sockaddr_un however long the path is."""
    if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def connect(path: Path, timeout_seconds: float) -> socket.socket:
    """A connection to the agent at `path`. Raises: OSError when nobody listens there any more."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_seconds)
        with socket_address(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    """In order of preference; what systemd or the user names comes first and alone."""
    if named := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return [Path(named).absolute()]
    places = []
    session = environ.get("XDG_RUNTIME_DIR", "")
    if session and Path(session).is_dir():
        places.append(Path(session).absolute() / "elasticd")
    if os.geteuid() == 0:
        places.append(_SYSTEM_DIRECTORY)
    return [*places, Path(f"/tmp/elasticd-{os.geteuid()}")]


def _prepare(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True)
        directory.chmod(0o700)  # whatever the umask
    except FileExistsError:
        pass
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(0, "is not a directory")
    if found.st_uid != os.geteuid():
        raise PermissionError(0, f"belongs to uid {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o022:  # somebody else's choice: it may be /tmp
        raise PermissionError(0, f"others may write there (mode {stat.S_IMODE(found.st_mode):o}; 700 is wanted)")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(0, "is not writable")
    return directory


def _is_trusted(directory: Path) -> bool:
    """Nobody but this user, or for root the service's user, can have put a false socket there."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    ours = found.st_uid in (os.geteuid(), 0) or (os.geteuid() == 0 and directory == _SYSTEM_DIRECTORY)
    return stat.S_ISDIR(found.st_mode) and ours and not found.st_mode & 0o022
