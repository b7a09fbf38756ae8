"""Where a worker's time goes between two reports, split by phase: whatever a moment belongs to, it is counted once.

The host's clock decides. Where a device works on its own, the host waits in another phase than the one that costs the
time; the device's own measurements of some phases then take their time out of the computing ones, and the sum stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elastic.progress import Phase

_NAMES = {
    Phase.DATA: "data",
    Phase.FORWARD_BACKWARD: "forward_backward",
    Phase.COMM_EXPOSED: "comm_exposed",
    Phase.OPTIMIZER: "optimizer",
    Phase.CHECKPOINT: "checkpoint",
}
_ON_DEVICE = ("forward_backward", "comm_exposed", "optimizer")
DeviceSeconds = Callable[[], Mapping[str, float]]  # of "comm_exposed" and "optimizer" since the last call


class PhaseClock:
    """Told of each change of phase by one thread."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._phase, self._since = Phase.STARTING, now()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self.device_seconds: DeviceSeconds | None = None

    def enter(self, phase: Phase) -> None:
        """From now on time is this phase's."""
        now = self._now()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """A step is over: the seconds of each phase of a step since the last one, as far as it was entered at all."""
        self.enter(self._phase)
        spent = {name: self._seconds[phase] for phase, name in _NAMES.items() if self._seconds[phase]}
        self._seconds = dict.fromkeys(Phase, 0.0)
        return spent if self.device_seconds is None else _corrected(spent, self.device_seconds())


def _corrected(spent: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """What is measured takes its time first, the rest is forward and backward."""
    left = sum(spent.get(name, 0.0) for name in _ON_DEVICE)
    parts = {}
    for name, seconds in measured.items():
        parts[name] = min(seconds, left)
        left -= parts[name]
    return {**spent, **parts, "forward_backward": left} if set(spent) & set(_ON_DEVICE) else dict(spent)
