"""`make bench`: every benchmark, one after another, each comparing side by side in one run and printing ratios."""

from __future__ import annotations

import subprocess
import sys
import time

BENCHES = (
    *("bench_step", "bench_balance", "bench_recovery", "bench_nodes", "bench_rendezvous"),
    *("bench_checkpoints", "bench_memory", "bench_metrics", "bench_scrape"),
)


def main() -> int:
    """Run those named on the command line, or all; a name may leave the prefix out."""
    names = [name if name.startswith("bench_") else f"bench_{name}" for name in sys.argv[1:]] or BENCHES
    failed = []
    for name in names:
        print(f"\n== {name} ==", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode:
            failed.append(name)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
