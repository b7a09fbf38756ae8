"""Pure: after which steps the state is kept in memory.

Every N steps, where N is given or is the smallest for which keeping costs less than 1 % of the time. What it costs
travels as sums of the step's exchange, so that all ranks act on the same numbers after the same step.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence

SHARE_OF_TIME = 0.01
SLOTS = 3  # of the exchange: seconds that the last keep cost, whether there was one, seconds of the last step
_MEASURED = 5  # the median of so many counts
_TRIALS = 3  # before that nothing is known: the first one finds cold memory


class MemoryPolicy:
    """Fed once per step with what all agreed on. `every`: steps, or None to measure."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._costs: collections.deque[float] = collections.deque(maxlen=_MEASURED)
        self._steps: collections.deque[float] = collections.deque(maxlen=_MEASURED)
        self._since = 0
        self._cost, self._kept, self._seconds = 0.0, False, 0.0

    def contribution(self) -> tuple[float, float, float]:
        """This rank's part of the next exchange."""
        contribution = (self._cost, float(self._kept), self._seconds)
        self._cost, self._kept, self._seconds = 0.0, False, 0.0
        return contribution

    def stepped(self, seconds: float) -> None:
        """The last step took so long on this rank, without what keeping cost."""
        self._seconds = seconds

    def kept(self, seconds: float) -> None:
        """Keeping the last step cost this rank so long."""
        self._cost, self._kept = seconds, True

    def waited(self, seconds: float) -> None:
        """What was kept last has held up training for so long since."""
        self._cost += seconds

    def is_due(self, sums: Sequence[float], world_size: int) -> bool:
        """Whether the step that was agreed on is to be kept; the same on all ranks."""
        cost, kept, seconds = sums
        if kept > 0:
            self._costs.append(cost / kept)
        if seconds > 0:
            self._steps.append(seconds / world_size)
        self._since += 1
        return self._since >= self.every

    def taken(self) -> None:
        """It was kept, or saved."""
        self._since = 0

    @property
    def every(self) -> int:
        """The interval as of now."""
        if self._every is not None:
            return self._every
        if len(self._costs) < _TRIALS or not self._steps:
            return 1
        return 1 + math.floor(statistics.median(self._costs) / (SHARE_OF_TIME * statistics.median(self._steps)))
