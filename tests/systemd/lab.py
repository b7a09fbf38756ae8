"""Three hosts on which a job is installed and trains, an etcd member on each; and what a test may ask of all that."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import ssl
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.demo.ledger import Audit, Entry, Sample, audit, planned_steps, read_ledger
from elastic.service import plan
from tests.support.etcd import Certificates
from tests.support.job import wait_for
from tests.systemd.hosts import Host, hosts

FOLDER = Path("/run/elasticd-test")
SHARED = "/srv/elasticd"  # where the hosts find what they share
CHECKPOINTS = "/srv/checkpoints"  # on a disk of its own, which can be full
UNIT = "elasticd@lab.service"
TTL = 5  # the default
SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 1000, 12, 2
START_SECONDS = 120.0  # a deadline: three cold starts on few cores
SAVE_SECONDS = 1.0
ELASTICD = Path(sys.executable).with_name("elasticd")
_ENDPOINTS = ",".join(f"el{i}:2379" for i in (1, 2, 3))

JOB = f"""
module = "elastic.demo.bytelm"
args = ["--device=cpu", "--layers=1", "--width=16", "--heads=2", "--context=16", "--samples={SAMPLES}",
    "--global-batch={GLOBAL_BATCH}", "--micro-batch={MICRO_BATCH}", "--steps=1000000", "--step-seconds=0.05",
    "--save-seconds={SAVE_SECONDS}", "--log-every=1000",
    "--ledger={SHARED}/ledger.jsonl", "--losses={SHARED}/losses.jsonl"]
nnodes = "2:3"
rdzv_backend = "etcd3"
rdzv_endpoint = "{_ENDPOINTS}"
rdzv_id = "lab"
etcd_ca = "/etc/elasticd/tls/ca.pem"
etcd_cert = "/etc/elasticd/tls/client.pem"
etcd_key = "/etc/elasticd/tls/client.key"
lease_ttl = {TTL}
last_call = 40
settle = 0.5
drain_grace = 60
checkpoint_dir = "{CHECKPOINTS}"
checkpoint_every = 30
memory_every = 1
max_restarts = 1000
http = "0.0.0.0:9431"
"""

Status = dict[str, Any]


class Lab:
    """The job `lab`, as its operators see it."""

    def __init__(self, machines: list[Host], shared: Path, certificates: Certificates) -> None:
        self.hosts = machines
        self.shared = shared
        self.checkpoints = shared.with_name("checkpoints")
        self._context = ssl.create_default_context(cafile=str(certificates.ca))
        self._context.load_cert_chain(*map(str, certificates.client))

    # systemctl.

    def systemctl(self, verb: str, *machines: Host) -> None:
        """On all of them at once; returns when each has done it."""
        threads = [
            threading.Thread(target=host.run, args=("systemctl", verb, UNIT), kwargs={"seconds": 120.0})
            for host in machines or self.hosts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def story(self) -> str:
        return "\n".join(f"== {host.name}\n{host.journal(UNIT)}" for host in self.hosts if host.is_on)

    # Training.

    def status(self, host: Host) -> Status | None:
        """None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{host.address}:9431/status", timeout=1.0) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return None

    def wait_training(self, *machines: Host, world: int | None = None, seconds: float = START_SECONDS) -> int:
        """Until they all train, beside each other and nobody else, and have taken a new step. Returns the round."""
        group = machines or tuple(self.hosts)

        def rounds() -> set[int]:
            return {self._round(self.status(host), world or len(group)) for host in group}

        def found() -> int:
            seen = rounds()
            return seen.pop() if len(seen) == 1 else 0

        try:
            number = wait_for(found, seconds=seconds, what=f"{[h.name for h in group]} train together")
            begun = self.newest()
            wait_for(lambda: self.newest()["step"] > begun["step"], what="a new step")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from exc
        return number

    @staticmethod
    def _round(status: Status | None, world: int) -> int:
        is_training = status is not None and status["state"] == "running" and status["world_size"] == world
        return int(status["round"]) if status is not None and is_training else 0

    def newest(self) -> dict[str, Any]:
        """The last step that was taken: round, step, time."""
        lines = self._tail(self.shared / "losses.jsonl")
        return dict(json.loads(lines[-1])) if lines else {"round": 0, "step": 0, "time": 0.0}

    def first_step_after(self, unix_time: float, seconds: float) -> dict[str, Any]:
        """The first step in a later round than the one of that time."""

        def lines() -> list[dict[str, Any]]:
            return [dict(json.loads(line)) for line in self._tail(self.shared / "losses.jsonl", 400_000)]

        before = max((line["round"] for line in lines() if line["time"] <= unix_time), default=0)
        return wait_for(
            lambda: next((x for x in lines() if x["round"] > before), None), seconds=seconds, what="a new round"
        )

    @staticmethod
    def _tail(path: Path, size: int = 4096) -> list[str]:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            lines = file.read().decode().split("\n")
            return lines[1 if end > size else 0 : -1]
        return []

    def audit(self) -> Audit:
        """What all steps taken so far have used, compared with what they should have."""
        ledger = read_ledger((self.shared / "ledger.jsonl").read_text())
        wanted = planned_steps(
            samples=SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=0, steps=ledger.last_step
        )
        return audit(_completed(ledger.entries, wanted), wanted)

    @property
    def committed_step(self) -> int:
        """Of the newest checkpoint on disk."""
        found = self.checkpoints.glob("step-*/manifest.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)

    def wait_saving(self) -> None:
        """Until a save has just begun."""
        seen = set(self._saves())
        wait_for(lambda: set(self._saves()) - seen, what="a save")

    def _saves(self) -> Iterator[str]:
        return (path.name for path in self.checkpoints.glob(".writing-*"))

    def fill_disk(self) -> None:
        """No checkpoint can be written from now on."""
        with contextlib.suppress(OSError), (self.checkpoints / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(2**16))

    def free_disk(self) -> None:
        (self.checkpoints / "filler").unlink(missing_ok=True)

    # What runs where.

    def agent(self, host: Host) -> int:
        """Its pid inside the host."""
        return int(host.show(UNIT, "MainPID"))

    def workers(self, host: Host) -> list[int]:
        """Pids inside the host."""
        status = wait_for(lambda: self.status(host))
        return [int(worker["pid"]) for worker in status["workers"]]

    def leftovers(self, host: Host) -> str:
        """What is left of the unit: processes of its user, files in shared memory."""
        return host.run("sh", "-c", "ps -u elasticd -o pid=,args=; ls /dev/shm | grep ^elasticd-", check=False).stdout

    # etcd.

    def etcd_leader(self) -> Host:
        def leader() -> Host | None:
            for host in self.hosts:
                with contextlib.suppress(OSError):
                    request = urllib.request.Request(f"https://{host.address}:2379/v3/maintenance/status", b"{}")
                    with urllib.request.urlopen(request, timeout=1.0, context=self._context) as answer:
                        status = json.load(answer)
                    if status.get("leader") == status["header"]["member_id"]:
                        return host
            return None

        return wait_for(leader, what="a leader of etcd")


def _completed(entries: Sequence[Entry], wanted: Mapping[int, Sequence[Sample]]) -> list[Entry]:
    """With the lines that a kill came before: between the update that all ranks took part in and its own line.

    That can only be in the last step of a round, and only where the next round went on after it: others hold its state.
    """
    last, first = {}, {}
    for entry in entries:
        last[entry.round] = max(entry.step, last.get(entry.round, 0))
        first[entry.round] = min(entry.step, first.get(entry.round, entry.step))
    added = []
    for number, after in itertools.pairwise(sorted(last)):
        step = last[number]
        if first[after] == step + 1:
            written = {(e.epoch, i) for e in entries if (e.round, e.step) == (number, step) for i in e.samples}
            missing = [sample for sample in wanted[step] if sample not in written]
            added += [Entry(round=number, step=step, epoch=e, rank=-1, samples=(i,)) for e, i in missing]
    return [*entries, *added]


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """The hosts with everything installed, by the commands of the README; the job is not started."""
    shared = FOLDER / "shared"
    with hosts(FOLDER, 3, {shared: SHARED, FOLDER / "checkpoints": CHECKPOINTS}) as machines:
        names = "".join(f",IP:{host.address},DNS:{host.name}" for host in machines)
        (FOLDER / "tls").mkdir()
        certificates = Certificates(FOLDER / "tls", names.removeprefix(","))
        (shared / "lab.toml").write_text(JOB)
        found = Lab(machines, shared, certificates)
        for host in machines:
            _install_etcd(host, certificates)
        for host in machines:
            host.run("systemctl", "enable", "--now", "--no-block", "elasticd-etcd")
        found.etcd_leader()
        for host in machines:
            _give_certificates(host, certificates, "client")
            host.run(str(ELASTICD), "install", f"{SHARED}/lab.toml")
            _edit(host)
            host.run("chown", "elasticd", "/etc/elasticd/tls/client.pem", "/etc/elasticd/tls/client.key")
        yield found


def _install_etcd(host: Host, certificates: Certificates) -> None:
    host.run(str(ELASTICD), "install", "--etcd")
    settings = plan._shipped("elasticd-etcd.env.example")
    settings = re.sub(r"(ETCD_NAME=|://)h1", rf"\g<1>{host.name}", settings)
    members = ",".join(f"el{i}=https://el{i}:2380" for i in (1, 2, 3))
    settings = re.sub(r"ETCD_INITIAL_CLUSTER=.*", f"ETCD_INITIAL_CLUSTER={members}", settings)
    (host.disk / "root/etc/elasticd/etcd.env").write_text(settings)
    _give_certificates(host, certificates, "etcd")
    host.run("chown", "elasticd-etcd", "/etc/elasticd/tls/etcd.pem", "/etc/elasticd/tls/etcd.key")


def _give_certificates(host: Host, certificates: Certificates, name: str) -> None:
    place = host.disk / "root/etc/elasticd/tls"
    place.mkdir(exist_ok=True)
    cert, key = certificates.server if name == "etcd" else certificates.client
    for source, target in ((certificates.ca, "ca.pem"), (cert, f"{name}.pem"), (key, f"{name}.key")):
        shutil.copy(source, place / target)


def _edit(host: Host) -> None:
    """What an operator would: a thread per worker on few cores, and a watchdog that tests need not wait long for."""
    etc = host.disk / "root/etc"
    (etc / "elasticd/lab.env").write_text("OMP_NUM_THREADS=1\n")
    (etc / f"systemd/system/{UNIT}.d/20-watchdog.conf").write_text("[Service]\nWatchdogSec=10s\nTimeoutAbortSec=3s\n")
    host.run("systemctl", "daemon-reload")
