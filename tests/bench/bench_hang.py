"""From the SIGSTOP of a worker to the next step of all ranks: with warm standbys, at most --hang-timeout + 1 s.

python -m tests.bench.bench_hang [--stops N] [--timeout S]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from pathlib import Path

from tests.support.job import running, wait_for

SCRIPT = str(Path(__file__).with_name("recovery_script.py"))
WORLD, SECONDS = 2, 120.0


def measure(folder: Path, stops: int, timeout: float) -> dict[str, object]:
    """Stop one worker after another. The incident's total begins with the last sign of the one that was stopped."""
    arguments = (f"--nproc-per-node={WORLD}", f"--hang-timeout={timeout}", f"--max-restarts={stops + 1}")
    with running(folder, "--http=127.0.0.1:0", *arguments, SCRIPT, str(folder), "10", "session", standby=True) as job:
        for number in range(1, stops + 1):
            wait_for(lambda n=number: job.output.count(" is warm") >= WORLD * n, seconds=SECONDS, what="standbys")  # type: ignore[misc]  # n is an int
            status = job.wait_status(
                lambda s: s["workers"] and all((w["step"] or 0) > s["base_step"] + 5 for w in s["workers"]),
                seconds=SECONDS,
            )
            os.kill(status["workers"][number % WORLD]["pid"], signal.SIGSTOP)
            status = job.wait_status(
                lambda s, n=number: len(s["incidents"]) == n and s["incidents"][-1]["seconds"]["total"],  # type: ignore[misc]
                seconds=SECONDS,
            )
    seconds = [incident["seconds"] for incident in status["incidents"]]
    over = [incident["total"] - timeout for incident in seconds]
    return {
        "timeout_seconds": timeout,
        "stops": stops,
        "median": {phase: statistics.median(s[phase] for s in seconds) for phase in seconds[0]},
        "total_over_timeout_median": statistics.median(over),
        "total_over_timeout_worst": max(over),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.stops, options.timeout), indent=2))


if __name__ == "__main__":
    main()
