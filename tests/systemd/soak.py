"""`make soak`: the three hosts train, and every 15 s something happens to one of them; seeded, so it can be had again.

What is told in the end: faults by kind with the longest pause of training that followed each, the share of the time in
which training got on, samples lost and doubled, and what was left behind. Exit 1 if any of it is not as it should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence

from elastic.cli_table import table
from tests.systemd.hosts import Host, what_is_missing
from tests.systemd.lab import TTL, Lab, lab

INTERVAL_SECONDS = 15.0
KINDS = ("worker killed", "agent killed", "agent frozen", "network cut", "etcd down", "disk full")
_AFTERWARDS_SECONDS = 120.0  # for the last fault to be recovered from


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens, to which host, and for how long where it has an end."""

    after_seconds: float  # the beginning
    kind: str
    host: int
    seconds: float


def schedule(seed: int, minutes: float) -> list[Fault]:
    """The same for the same arguments."""
    draw = random.Random(seed)
    times = [INTERVAL_SECONDS * (n + 1) for n in range(int(minutes * 60 / INTERVAL_SECONDS))]
    return [
        Fault(after_seconds=t, kind=draw.choice(KINDS), host=draw.randrange(3), seconds=draw.uniform(1, 3) * TTL)
        for t in times
    ]


class Soak:
    """The faults, each begun and ended on a thread of its own."""

    def __init__(self, job: Lab) -> None:
        self.job = job
        self.struck: list[tuple[Fault, float]] = []  # with the unix time
        self._threads: list[threading.Thread] = []

    def run(self, faults: Sequence[Fault]) -> None:
        begun = time.monotonic()
        for fault in faults:
            time.sleep(max(0.0, begun + fault.after_seconds - time.monotonic()))
            say(f"{fault.after_seconds:6.0f} s  {fault.kind} on el{fault.host + 1}  step {self.job.newest()['step']}")
            self.struck.append((fault, time.time()))
            thread = threading.Thread(target=self._strike, args=(fault,))
            thread.start()
            self._threads.append(thread)
        for thread in self._threads:
            thread.join()

    def _strike(self, fault: Fault) -> None:
        getattr(self, "_" + fault.kind.replace(" ", "_"))(self.job.hosts[fault.host], fault.seconds)

    def _worker_killed(self, host: Host, _seconds: float) -> None:
        status = self.job.status(host) or {"workers": ()}
        for worker in status["workers"]:
            host.run("kill", "-KILL", str(worker["pid"]), check=False)

    def _agent_killed(self, host: Host, _seconds: float) -> None:
        if (agent := self.job.agent(host)) != 0:  # else it is being restarted
            host.run("kill", "-KILL", str(agent), check=False)

    def _agent_frozen(self, host: Host, seconds: float) -> None:
        if (agent := self.job.agent(host)) != 0:
            host.run("kill", "-STOP", str(agent), check=False)
            time.sleep(seconds)
            host.run("kill", "-CONT", str(agent), check=False)

    def _network_cut(self, host: Host, seconds: float) -> None:
        host.cut()
        time.sleep(seconds)
        host.heal()

    def _etcd_down(self, host: Host, seconds: float) -> None:
        host.run("systemctl", "stop", "elasticd-etcd", check=False)
        time.sleep(seconds)
        host.run("systemctl", "start", "--no-block", "elasticd-etcd", check=False)

    def _disk_full(self, _host: Host, seconds: float) -> None:
        self.job.fill_disk()
        time.sleep(seconds)
        self.job.free_disk()


def pauses(job: Lab, struck: Sequence[tuple[Fault, float]]) -> dict[str, list[float]]:
    """kind -> the longest time without a new step that began between each fault and the next one."""
    lines = (job.shared / "losses.jsonl").read_text().splitlines()
    times = [float(json.loads(line)["time"]) for line in lines]
    ends = [at for _, at in struck[1:]] + [times[-1]]
    found: dict[str, list[float]] = {}
    for (fault, at), end in zip(struck, ends, strict=True):
        gaps = [after - before for before, after in itertools.pairwise(times) if after > at and before < end]
        found.setdefault(fault.kind, []).append(max(gaps, default=0.0))
    return found


def goodput(job: Lab) -> float:
    """The share of the time in which steps were taken that count: new steps, each as long as the median one."""
    lines = [json.loads(line) for line in (job.shared / "losses.jsonl").read_text().splitlines()]
    times = [float(line["time"]) for line in lines]
    step_seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    return len({line["step"] for line in lines}) * step_seconds / (times[-1] - times[0])


def report(job: Lab, soak: Soak) -> bool:
    """Whether all is as it should be."""
    rows = [
        (kind, len(found), f"{statistics.median(found):.1f}", f"{max(found):.1f}")
        for kind, found in sorted(pauses(job, soak.struck).items())
    ]
    say("\n" + table(("fault", "times", "pause s, median", "worst"), rows))
    audit = job.audit()
    left = "".join(job.leftovers(host) for host in job.hosts)
    say(
        f"\nsteps {audit.steps}, committed {job.committed_step}, goodput {goodput(job):.0%}, "
        f"samples lost {audit.lost}, doubled {audit.doubled}, leaks {len(left.splitlines())}"
    )
    if left:
        say(left)
    return audit.is_right and not left and audit.steps == job.committed_step


def main(argv: Sequence[str], tell: Callable[[str], object]) -> int:
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if missing := what_is_missing():
        tell(missing)
        return 2
    with lab() as job:
        job.systemctl("start")
        job.wait_training()
        soak = Soak(job)
        soak.run(schedule(options.seed, options.minutes))
        try:
            job.wait_training(seconds=_AFTERWARDS_SECONDS)
        finally:
            job.systemctl("stop")
        if report(job, soak):
            return 0
        tell(job.story())
        return 1


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], say))
