"""Seconds from the SIGKILL of a worker to the next step that all ranks have applied: `torchrun` and `elasticd run`.

Side by side in one run, the same script, two gloo ranks; each launcher's kills alternate with the other's.

    python -m tests.bench.bench_recovery [--kills N]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.job import wait_for

SCRIPT = str(Path(__file__).with_name("recovery_script.py"))
WORLD = 2
SECONDS = 60.0


def launch(name: str, folder: Path, kills: int) -> subprocess.Popen[bytes]:
    """Start the launcher in a folder of its own, with a budget for all the kills."""
    (folder / "run").mkdir(parents=True, mode=0o700)
    module = (
        ["torch.distributed.run", "--standalone"] if name == "torchrun" else ["elastic", "run", "--http", "127.0.0.1:0"]
    )
    command = [*module, f"--nproc-per-node={WORLD}", f"--max-restarts={kills + 3}", SCRIPT, str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RUNTIME_DIRECTORY": str(folder / "run")}
    # Without this, torchrun hands the last attempt's keys to the next one's gloo, which then fails to connect until the
    # restarts are spent ("connectFullMesh ... Connection refused"): torchrun is timed at its best.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", *command], env=environ, stdout=log, stderr=log)


def steps(folder: Path, attempt: int) -> dict[int, list[float]]:
    """Times of each step of the attempt, one per rank that has applied it."""
    found: dict[int, list[float]] = {}
    path = folder / "times"
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = line.split()
        if len(fields) == 4 and int(fields[0]) == attempt:
            found.setdefault(int(fields[2]), []).append(float(fields[3]))
    return {step: times for step, times in found.items() if len(times) == WORLD}


def victim(launcher: int) -> int:
    """The pid of a worker: a descendant that runs the script."""
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    return max(int(pid) for pid, parent, args in rows if int(parent) == launcher and SCRIPT in args)


def measure(process: subprocess.Popen[bytes], folder: Path) -> float:
    """Kill one worker of the newest attempt and wait for the first whole step of a later one."""
    attempt = wait_for(lambda: newest(folder, steps_at_least=25), seconds=SECONDS, what="25 steps of one attempt")
    killed = time.monotonic()
    os.kill(victim(process.pid), signal.SIGKILL)
    later = wait_for(lambda: newest(folder, above=attempt), seconds=SECONDS, what=f"a step after attempt {attempt - 1}")
    after = steps(folder, later - 1)
    return max(after[min(after)]) - killed


def newest(folder: Path, *, above: int = 0, steps_at_least: int = 1) -> int:
    """1 + the newest attempt, 0 when it is not above `above` or has fewer whole steps than that yet."""
    path = folder / "times"
    lines = path.read_text().splitlines() if path.exists() else []
    number = max((int(line.split()[0]) + 1 for line in lines if len(line.split()) == 4), default=0)
    return number if number > above and len(steps(folder, number - 1)) >= steps_at_least else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    seconds: dict[str, list[float]] = {"torchrun": [], "elasticd": []}
    with tempfile.TemporaryDirectory() as root:
        for name in seconds:
            folder = Path(root) / name
            process = launch(name, folder, kills)
            try:
                seconds[name] = [measure(process, folder) for _ in range(kills)]
            except AssertionError:
                print((folder / "log").read_text()[-4000:])
                raise
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(20)
    print(f"worker killed -> next new step, {WORLD} ranks, {kills} kills each, seconds")
    print(f"{'':10} {'median':>8} {'worst':>8}")
    for name, values in seconds.items():
        print(f"{name:10} {statistics.median(values):8.3f} {max(values):8.3f}")
    ratio = statistics.median(seconds["elasticd"]) / statistics.median(seconds["torchrun"])
    print(f"ratio elasticd / torchrun: {ratio:.3f} (cold workers; warm standbys are to bring it to 0.05)")


if __name__ == "__main__":
    main()
