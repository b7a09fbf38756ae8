"""Hosts on this machine, each with a real systemd as PID 1, an address of its own and a disk that survives its power.

systemd-nspawn boots them from an overlay of this machine's root, so they have its programs and write only their own
layer. They hang on one bridge, each by a cable that can be pulled. Needs root, systemd-nspawn and ip.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.etcd import find_etcd
from tests.support.job import wait_for

NETWORK = "10.78.0"
_BRIDGE = "elt0"
_BOOT_SECONDS = 60.0
_COMMAND_SECONDS = 60.0
# Services that this machine happens to have installed stay off in the hosts.
_MASKED = (
    *(
        "etcd",
        "prometheus",
        "prometheus-node-exporter",
        "postgresql",
        "nvmf-autoconnect",
        "openipmi",
        "systemd-networkd",
    ),
    *("systemd-resolved", "systemd-timesyncd", "apparmor", "ssh", "cron", "rsyslog", "docker", "containerd"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_reap", "man-db.timer", "dpkg-db-backup.timer"),
)
_LOCK = Path("/run/elasticd-test-hosts.lock")


def what_is_missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts with a systemd need root"
    missing = [name for name in ("systemd-nspawn", "ip", "nsenter", "mount") if shutil.which(name) is None]
    return f"hosts need {', '.join(missing)}: apt-get install systemd-container iproute2" if missing else ""


class Host:
    """One of them. Its disk is a tmpfs below `folder`, and survives `power_off`."""

    def __init__(self, index: int, folder: Path, binds: Mapping[Path, str]) -> None:
        """`binds`: directories of this machine that it shares, and where it finds them."""
        self.name = f"el{index}"
        self.address = f"{NETWORK}.{index}"
        self.disk = folder / self.name
        self.log = folder / f"{self.name}.log"
        self._namespace = f"elt{index}"
        self._cable = f"eltv{index}"
        self._binds = binds
        self._nspawn: subprocess.Popen[bytes] | None = None

    # Making and taking apart.

    def make(self) -> None:
        ip("netns", "add", self._namespace)
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "host0", "netns", self._namespace)
        ip("link", "set", self._cable, "master", _BRIDGE, "up")
        ip("-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "host0")
        ip("-n", self._namespace, "link", "set", "host0", "up")
        ip("-n", self._namespace, "link", "set", "lo", "up")
        self.disk.mkdir()
        run("mount", "-t", "tmpfs", "tmpfs", str(self.disk))
        for part in ("layer", "work", "root"):
            (self.disk / part).mkdir()
        self._lay_out()
        layers = f"lowerdir=/,upperdir={self.disk}/layer,workdir={self.disk}/work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.disk / "root"))

    def _lay_out(self) -> None:
        """What is this host's own."""
        layer = self.disk / "layer"
        units = layer / "etc/systemd/system"
        units.mkdir(parents=True)
        for unit in _MASKED:
            (units / (unit if "." in unit else f"{unit}.service")).symlink_to("/dev/null")
        (layer / "etc/hostname").write_text(f"{self.name}\n")
        (layer / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        names = "".join(f"{NETWORK}.{i} el{i}\n" for i in range(1, 10))
        (layer / "etc/hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (layer / "root").mkdir(mode=0o755)  # the interpreter may lie below root's home
        (layer / "var/log/journal").mkdir(parents=True)  # kept over a boot
        (layer / "usr/bin").mkdir(parents=True)
        (layer / "usr/bin/etcd").symlink_to(find_etcd())

    def remove(self) -> None:
        """Whatever state it is in; leaves nothing."""
        self.power_off()
        unmount(self.disk / "root")
        unmount(self.disk)
        if Path(f"/run/netns/{self._namespace}").exists():
            subprocess.run(["ip", "netns", "del", self._namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._cable], check=False, capture_output=True)

    # Power and network.

    def boot(self, *, wait: bool = True) -> None:
        command = [
            *("setpriv", "--pdeathsig", "KILL"),  # a test process that is killed takes them along
            *("systemd-nspawn", "-q", "-D", str(self.disk / "root"), "--boot", "--register=no", "--keep-unit"),
            *("--link-journal=no", "-M", self.name, f"--network-namespace-path=/run/netns/{self._namespace}"),
            *(f"--bind={ours}:{theirs}" for ours, theirs in self._binds.items()),
        ]
        with self.log.open("ab") as log:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait_booted()

    def wait_booted(self) -> None:
        wait_for(self._is_booted, seconds=_BOOT_SECONDS, what=f"{self.name} boots; see {self.log}")

    def _is_booted(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, f"{self.name} has ended: {self.log.read_text(errors='replace')[-2000:]}"
        if self._init is None:
            return False
        done = self.run("systemctl", "is-system-running", check=False)
        return done.stdout.strip() in ("running", "degraded")

    def power_off(self) -> None:
        """Without a word: every process of it is gone when this returns."""
        if self._nspawn is None:
            return
        init = self._init
        if init is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
        try:
            self._nspawn.wait(20)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait(20)
        self._nspawn = None

    @property
    def is_on(self) -> bool:
        return self._nspawn is not None

    def cut(self) -> None:
        ip("link", "set", self._cable, "down")

    def heal(self) -> None:
        ip("link", "set", self._cable, "up")

    # Inside.

    @property
    def _init(self) -> int | None:
        """Its PID 1, as this machine sees it."""
        if self._nspawn is None:
            return None
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def run(
        self, *command: str, check: bool = True, seconds: float = _COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """A command inside, with an environment of its own."""
        environ = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
        enter = ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p", *environ]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=seconds, check=False)
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {' '.join(command)} exits {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done

    def outside(self, pid: int) -> int:
        """What this machine knows a process inside by."""
        namespace = Path(f"/proc/{self._init}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (entry / "ns/pid").readlink() == namespace:
                    status = (entry / "status").read_text()
                    inside = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
                    if int(inside) == pid:
                        return int(entry.name)
        raise AssertionError(f"{self.name} has no process {pid}")

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "-u", unit, "-o", "short-precise", "--no-pager", "-n", "400").stdout


@contextlib.contextmanager
def hosts(folder: Path, count: int, binds: Mapping[Path, str]) -> Iterator[list[Host]]:
    """They are booted; afterwards nothing of them is left: no process, mount, namespace, link.

    There can be one set of them at a time, for their names; what a killed run has left is removed first.
    """
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(_LOCK.open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = [Host(index, folder, binds) for index in range(1, count + 1)]
        _remove(made, binds)
        undo.callback(_remove, made, binds)
        folder.mkdir(exist_ok=True)
        for shared in binds:
            shared.mkdir()
            run("mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", str(shared))
        ip("link", "add", _BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.254/24", "dev", _BRIDGE)
        ip("link", "set", _BRIDGE, "up")
        for host in made:
            host.make()
            host.boot(wait=False)
        for host in made:
            host.wait_booted()
        yield made


def _remove(made: list[Host], binds: Iterable[Path]) -> None:
    with contextlib.ExitStack() as undo:  # from the last to the first; each is done though another fails
        undo.callback(shutil.rmtree, made[0].disk.parent, ignore_errors=True)
        for shared in binds:
            undo.callback(unmount, shared)
        undo.callback(subprocess.run, ["ip", "link", "del", _BRIDGE], check=False, capture_output=True)
        for host in made:
            undo.callback(host.remove)


def unmount(place: Path) -> None:
    """Once nobody uses it any more."""
    if place.is_mount():
        wait_for(lambda: subprocess.run(["umount", place], capture_output=True, check=False).returncode == 0)


def ip(*arguments: str) -> None:
    run("ip", *arguments)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> int:
    """Whether one can be booted here: exit code 0, else what is in the way."""
    if missing := what_is_missing():
        sys.stderr.write(f"{missing}\n")
        return 1
    try:
        with hosts(Path("/run/elasticd-test-probe"), 1, {}):
            return 0
    except (AssertionError, OSError, subprocess.SubprocessError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
