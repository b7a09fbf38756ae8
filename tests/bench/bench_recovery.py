"""Seconds from the SIGKILL of a worker to the next step that all ranks have applied: `torchrun` and `elasticd run`.

Side by side in one run, the same script, two gloo ranks. elasticd is timed with warm standbys, with the script telling
the agent where it is (which gives the phases), and cold.

    python -m tests.bench.bench_recovery [--kills N] [--rival-kills N] [--megabytes N]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic import runtime
from tests.support.job import wait_for

SCRIPT = str(Path(__file__).with_name("recovery_script.py"))
WORLD = 2
SECONDS = 120.0
SETTLED_SECONDS = 11.0  # a plain script that fails sooner is slowed down by elasticd: it may be a crash loop
PHASES = ("detect", "stop", "rendezvous", "start", "restore", "first_step", "total")
TORCHRUN = ["torch.distributed.run", "--standalone"]
ELASTICD = ["elastic", "run", "--http", "127.0.0.1:0"]


class Launch:
    """One launcher at work in a folder of its own, with a budget for all the kills."""

    def __init__(self, folder: Path, launcher: list[str], script_args: list[str], kills: int) -> None:
        self.folder = folder
        self.warm = "--standby" in launcher
        (folder / "run").mkdir(parents=True, mode=0o700)
        command = [*launcher, f"--nproc-per-node={WORLD}", f"--max-restarts={kills + 3}", SCRIPT, str(folder)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RUNTIME_DIRECTORY": str(folder / "run")}
        # Without this, torchrun hands the last attempt's keys to the next one's gloo, which then fails to connect until
        # the restarts are spent ("connectFullMesh ... Connection refused"): torchrun is timed at its best.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *script_args], env=environ, stdout=log, stderr=log
            )

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)

    def measure(self, kill: int, steps: int) -> float:
        """Kill one worker of the newest attempt and wait for the first whole step of a later one."""
        attempt = wait_for(lambda: self.newest(steps_at_least=steps), seconds=SECONDS, what=f"{steps} steps")
        begun = min(min(times) for times in self.steps(attempt - 1).values())
        wait_for(lambda: time.monotonic() - begun > SETTLED_SECONDS, seconds=SECONDS)
        if self.warm:
            wait_for(lambda: self.log().count(" is warm") >= WORLD * (kill + 1), seconds=SECONDS, what="standbys")
        killed = time.monotonic()
        os.kill(self.victim(), signal.SIGKILL)
        later = wait_for(lambda: self.newest(above=attempt), seconds=SECONDS, what=f"a step after attempt {attempt}")
        after = self.steps(later - 1)
        return max(after[min(after)]) - killed

    def victim(self) -> int:
        """The pid of a worker: a child that runs the script."""
        args = ["ps", "-e", "-o", "pid=,ppid=,args="]
        rows = [line.split(None, 2) for line in subprocess.check_output(args, text=True).splitlines()]
        return max(int(pid) for pid, parent, args in rows if int(parent) == self.process.pid and SCRIPT in args)

    def steps(self, attempt: int) -> dict[int, list[float]]:
        """Times of each step of the attempt that all ranks have applied."""
        found: dict[int, list[float]] = {}
        for fields in self.times():
            if int(fields[0]) == attempt:
                found.setdefault(int(fields[2]), []).append(float(fields[3]))
        return {step: times for step, times in found.items() if len(times) == WORLD}

    def times(self) -> list[list[str]]:
        path = self.folder / "times"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split() for line in lines if len(line.split()) == 5]

    def newest(self, *, above: int = 0, steps_at_least: int = 1) -> int:
        """1 + the newest attempt, 0 when it is not above `above` or has fewer whole steps than that yet."""
        number = max((int(fields[0]) + 1 for fields in self.times()), default=0)
        return number if number > above and len(self.steps(number - 1)) >= steps_at_least else 0

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def incidents(self) -> list[dict[str, Any]]:
        """What the agent says of its recoveries."""
        with runtime.connect(runtime.socket_path(self.folder / "run", self.process.pid), 5.0) as connection:
            connection.sendall(b"GET /status HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        found: list[dict[str, Any]] = json.loads(answer.partition(b"\r\n\r\n")[2])["incidents"]
        return found


@contextmanager
def launched(*args: Any) -> Iterator[Launch]:
    launch = Launch(*args)
    try:
        yield launch
    except AssertionError:
        print(launch.log()[-4000:])
        raise
    finally:
        launch.close()


def show_phases(incidents: list[dict[str, Any]]) -> None:
    """Medians, and how far the phases are from their total at worst."""
    seconds = [incident["seconds"] for incident in incidents if incident["seconds"]["total"] is not None]
    print("    phases, medians, ms:", *(f"{p} {1e3 * statistics.median(s[p] for s in seconds):.0f}" for p in PHASES))
    gaps = [abs(sum(s[p] for p in PHASES[:-1]) - s["total"]) / s["total"] for s in seconds]
    print(f"    their sum differs from the total by at most {100 * max(gaps):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rival-kills", type=int, default=3, help="of torchrun, and of elasticd cold: seconds each")
    parser.add_argument("--megabytes", type=float, default=10)
    given = parser.parse_args()
    steps = 25 if given.megabytes < 100 else 3
    variants: dict[str, tuple[list[str], list[str], int]] = {
        "torchrun": (TORCHRUN, [], given.rival_kills),
        "elasticd": ([*ELASTICD, "--standby"], [], given.kills),
        "  with session": ([*ELASTICD, "--standby"], ["session"], given.kills),
        "  cold": ([*ELASTICD, "--no-standby"], [], given.rival_kills),
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind
    print(f"worker killed -> next new step, {WORLD} ranks, state of {given.megabytes:g} MB, seconds")
    print(f"{'':16} {'kills':>5} {'median':>8} {'worst':>8} {'/ torchrun':>10}", flush=True)
    rival = 0.0
    with tempfile.TemporaryDirectory() as root:
        for name, (launcher, more, kills) in variants.items():
            folder = Path(root) / name.strip().replace(" ", "-")
            with launched(folder, launcher, [str(given.megabytes), *more], kills) as launch:
                seconds = [launch.measure(kill, steps) for kill in range(kills)]
                incidents = launch.incidents() if more else []
            (folder / "state.pt").unlink(missing_ok=True)
            median = statistics.median(seconds)
            rival = rival or median
            print(f"{name:16} {kills:5} {median:8.3f} {max(seconds):8.3f} {median / rival:10.3f}", flush=True)
            if incidents:
                show_phases(incidents)


if __name__ == "__main__":
    main()
