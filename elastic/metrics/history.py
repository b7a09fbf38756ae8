"""The recent past of a job, for the page: a bounded number of points, close together of late and thinned before that.

Fixed memory whatever the job's length, and no file: it begins with the agent and ends with it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import threading
from collections.abc import Mapping, Sequence

from elastic.progress import Progress
from elastic.status import JobStatus

RECENT_SECONDS, RECENT_POINTS = 1.0, 600
WHOLE_SECONDS, WHOLE_POINTS = 4.0, 720  # at first; their distance doubles each time that they are full


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was so at a moment. `time` is unix seconds; None = not known."""

    time: float
    state: str
    round: int
    world_size: int
    step: int | None = None
    loss: float | None = None
    step_seconds: float | None = None  # of the slowest local worker
    goodput: float | None = None

    def values(self) -> list[float | str | None]:
        return [getattr(self, name) for name in COLUMNS]


COLUMNS = tuple(field.name for field in dataclasses.fields(Point))


def point_of(time: float, status: JobStatus, reports: Sequence[Progress], goodput: float) -> Point:
    """The moment as the page shows it; `reports` are those of the live local workers that have reported."""
    stepping = [report for report in reports if report.in_loop and report.step >= 0]
    behind = min(stepping, key=lambda report: report.step, default=None)
    began = behind is not None and behind.first_step_at > 0  # else what it says of a step is of none in this round
    return Point(
        time=round(time, 3),
        state=status.state,
        round=status.round,
        world_size=status.world_size,
        step=behind.step if behind is not None else None,
        loss=_known(behind.loss) if behind is not None and began else None,
        step_seconds=_known(max((report.step_seconds for report in stepping), default=0.0) or math.nan),
        goodput=_known(goodput),
    )


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class History:
    """Fed by the agent's loop, read by any thread."""

    def __init__(self) -> None:
        self._recent: collections.deque[Point] = collections.deque(maxlen=RECENT_POINTS)
        self._whole: list[Point] = []
        self._whole_seconds = WHOLE_SECONDS
        self._lock = threading.Lock()

    def is_due(self, time: float, status: JobStatus) -> bool:
        """Whether the moment is to be noted: a second has passed, state or round changed, or the clock was set back."""
        if not self._recent:
            return True
        last = self._recent[-1]
        return not 0 <= time - last.time < RECENT_SECONDS or (status.state, status.round) != (last.state, last.round)

    def note(self, point: Point) -> None:
        with self._lock:
            if self._recent and point.time < self._recent[-1].time:  # the clock was set back: times must grow
                self._recent.clear()
                self._whole = [old for old in self._whole if old.time < point.time]
            self._recent.append(point)
            if not self._whole or point.time - self._whole[-1].time >= self._whole_seconds:
                self._whole.append(point)
            if len(self._whole) > WHOLE_POINTS:
                self._whole = self._whole[::2]
                self._whole_seconds *= 2

    def since(self, time: float) -> list[Point]:
        """What was noted after `time`, oldest first; thinned where it is old."""
        with self._lock:
            recent, whole = list(self._recent), list(self._whole)
        began = recent[0].time if recent else math.inf
        return [point for point in (*(old for old in whole if old.time < began), *recent) if point.time > time]

    def to_json(self, since: float, now: float, commits: Mapping[str, float]) -> str:
        """As `/points` answers: columns and rows, the agent's clock, and when each tier was last committed to."""
        rows = [point.values() for point in self.since(since)]
        told = {"now": now, "commits": dict(commits), "columns": COLUMNS, "points": rows}
        return json.dumps(told, allow_nan=False, separators=(",", ":"))
