"""What the agent's tests start their jobs with."""

from __future__ import annotations

from pathlib import Path

TRAINER = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--shutdown-timeout", "1")
PAIR = (*QUICK, "--nproc-per-node", "2")
FOREVER = (TRAINER, "100000", "0.02", "state")
