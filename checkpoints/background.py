"""The one background thread of a manager: it runs a commit, applies retention, and keeps the result."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable

from .claim import Claim
from .commit import Commit, Job, Outcome, State
from .errors import CheckpointError
from .exchange import Exchange
from .groups import Groups, find_groups, one_group
from .line import Line
from .publish import retain
from .storage import Storage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """How a save ended. `unknown`: the next reading of the directory tells; a restore does that anyway."""

    step: int
    state: State
    error: str | None
    bytes: int
    stall_seconds: float
    write_seconds: float
    unix_time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the commits of one manager have in common."""

    fence: Callable[[], float]
    keep_last: int
    keep_every: int | None
    on_result: Callable[[CommitResult], None] | None


class Background:
    """Runs commits one after the other. The exchange is this thread's while a commit is in flight."""

    def __init__(self, storage: Storage, exchange: Exchange, policy: Policy, claim: Claim) -> None:
        self._storage, self._exchange, self._policy, self._claim = storage, exchange, policy, claim
        self._jobs: queue.SimpleQueue[tuple[Job, Line, float] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._groups: Groups | None = None
        self._current: tuple[Job, float] | None = None
        self._waited_seconds = 0.0
        self.result: CommitResult | None = None

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def wait(self, timeout_seconds: float) -> CommitResult | None:
        """The newest commit's result; `unknown` when it is still in flight after `timeout_seconds`."""
        if self._idle.wait(timeout_seconds) or self._current is None:
            return self.result
        job, stall_seconds = self._current
        error = f"the commit is still in flight after {time.monotonic() - job.started:.1f} s"
        return _result(job, Outcome(state="unknown", error=error), stall_seconds)

    def start(self, job: Job, line: Line, stall_seconds: float) -> None:
        """Hand over a commit. When the one before is stuck beyond its deadline, this one fails at once."""
        if self.busy:
            self._report(line, _result(job, Outcome(state="failed", error=job.refusal), stall_seconds))
            return
        if self._thread is None:  # before it counts as busy: a thread may fail to start
            thread = threading.Thread(target=self._serve, name="checkpoint-commit", daemon=True)
            thread.start()
            self._thread = thread
        self._idle.clear()
        self._waited_seconds = 0.0
        self._current = (job, stall_seconds)
        self._jobs.put((job, line, stall_seconds))

    def waited(self, seconds: float) -> None:
        """Training stood still for so long after the save had returned, for the rest of its copy."""
        self._waited_seconds += seconds

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the commit in flight and end the thread; False when it is stuck, and left behind."""
        ended = self._idle.wait(timeout_seconds)
        self._jobs.put(None)
        if self._thread is not None and ended:
            self._thread.join(timeout_seconds)
        return ended

    def groups(self, world_size: int) -> Groups:
        """The writing groups as far as they are known."""
        return self._groups if self._groups is not None else one_group(world_size)

    @property
    def groups_known(self) -> bool:
        return self._groups is not None

    def find_groups(self, line: Line, *, attempt: int, deadline: float) -> None:
        """Agree on the writing groups, unless that is done. Collective: all ranks succeed or all raise."""
        if self._groups is None:
            self._groups = find_groups(
                self._storage,
                line.directory,
                self._exchange,
                rank=line.rank,
                world_size=line.world_size,
                nonce=f"{line.nonce}g{attempt}",
                deadline=deadline,
                check=lambda: self._claim.look(line),
            )

    def _serve(self) -> None:
        while (request := self._jobs.get()) is not None:
            try:
                self._handle(*request)
            except BaseException:  # the top of the thread: nothing may raise into training, nor end the thread
                logger.exception("the commit of step %d is reported; what follows it broke", request[0].step)
            finally:
                del request  # not held while idle
                self._idle.set()

    def _handle(self, job: Job, line: Line, stall_seconds: float) -> None:
        """Commit, report, retain. The result is kept before anything else may fail."""
        outcome = self._try_commit(job, line)
        result = _result(job, outcome, stall_seconds)
        stalled = result.stall_seconds + self._waited_seconds  # the wait went on beside the write
        self.result = result = dataclasses.replace(result, stall_seconds=stalled)
        self._current = None
        try:
            if job.share is not None:
                job.share.image.release()
        finally:
            self._report(line, result)
        if outcome.state == "committed":
            self._retain(line)

    def _try_commit(self, job: Job, line: Line) -> Outcome:
        try:
            return self._commit(job, line)
        except BaseException as exc:
            logger.exception("the commit of step %d broke", job.step)
            return Outcome(state="unknown", error=f"{type(exc).__name__}: {exc}")

    def _commit(self, job: Job, line: Line) -> Outcome:
        try:
            self.find_groups(line, attempt=job.number + 1, deadline=job.deadline)
        except (CheckpointError, OSError) as exc:
            return Outcome(state="failed", error=str(exc))
        if self._groups != job.groups:
            return Outcome(state="failed", error="the directories of the ranks are known only now; the next save works")
        return Commit(job, line, self._storage, self._exchange, self._policy.fence, self._claim).run()

    def _retain(self, line: Line) -> None:
        """Every group's leader prunes its own directory; that it cannot is no failure of the commit."""
        if self.groups(line.world_size).leaders[line.rank] != line.rank:
            return
        policy = self._policy
        try:
            retain(self._storage, line.directory, keep_last=policy.keep_last, keep_every=policy.keep_every)
        except (OSError, CheckpointError) as exc:
            logger.warning("retention in %s failed: %s", line.directory, exc)

    def _report(self, line: Line, result: CommitResult) -> None:
        """In words that stand alone: a program without a logging set-up shows the message and nothing else."""
        job = f"run={line.run_id} round={line.round} " if line.run_id else ""
        what = f"{job}rank={line.rank} checkpoint of step {result.step} {result.state}"
        if result.state == "committed":
            logger.info("%s in %.3f s", what, result.write_seconds)
        else:
            logger.error("%s: %s; training goes on, the next save tries again", what, result.error)
        if self._policy.on_result is not None:
            try:
                self._policy.on_result(result)
            except BaseException:  # the caller's function on our thread
                logger.exception("on_result failed for step %d", result.step)


def _result(job: Job, outcome: Outcome, stall_seconds: float) -> CommitResult:
    return CommitResult(
        step=job.step,
        state=outcome.state,
        error=outcome.error,
        bytes=job.share.snapshot.plan.layout.size_bytes if job.share is not None else 0,
        stall_seconds=stall_seconds,
        write_seconds=time.monotonic() - job.started - stall_seconds,
        unix_time=time.time(),
    )
