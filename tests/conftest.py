"""What every test gets: one thread per process, and no process of ours left behind."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
