"""How the job ended on this node, and the line of the log that says so."""

from __future__ import annotations

import dataclasses
import logging
import time
from concurrent.futures import Future

from elastic.config import JobConfig
from elastic.errors import ElasticError, ExitCode
from elastic.metrics.site import Answer, Ask, json_line
from elastic.status import FailureStatus

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What an agent knows when its loop is over.

    Attributes:
        error: why this node could not go on, where that is no worker's fault.
        cause: why the job has failed, the same on every node; empty while it has not.
        had_last_round: workers of the job's last round ran here; not on a spare.
        applied_step, committed_step: the newest that any worker has told of; -1: none has.
        last_words: what a stop means to workers of this kind.
        is_in_memory: steps that could not be saved wait there for the next start.
    """

    exit_code: ExitCode
    error: ElasticError | None
    cause: str
    had_last_round: bool
    applied_step: int
    committed_step: int
    failure: FailureStatus | None
    last_words: str
    is_in_memory: bool = False


class Farewell:
    """How this agent has ended, for those who wait for that on its socket: POST /end is answered then.

    `answer` is for any thread.
    """

    def __init__(self) -> None:
        self._ending: Future[Ending] = Future()
        self._waiting = 0

    def answer(self, _: Ask) -> Answer:
        self._waiting += 1
        ending = self._ending.result()
        told = {"exit_code": ending.exit_code, "step": ending.applied_step, "committed_step": ending.committed_step}
        return Answer(200, json_line(told), "application/json")

    def tell(self, ending: Ending) -> None:
        """The answers are on their way when this returns; the server may be closed."""
        self._ending.set_result(ending)
        if self._waiting:
            time.sleep(_ANSWER_SECONDS)


def say_how_it_ended(ending: Ending, config: JobConfig) -> None:
    """The last line of the log."""
    checkpoint_dir = config.checkpoint_dir
    code, applied, on_disk = ending.exit_code, ending.applied_step, ending.committed_step
    place = f" in {checkpoint_dir}" if checkpoint_dir else ""
    newest = f"step {on_disk} is the newest that is committed{place}" if on_disk >= 0 else "nothing was committed"
    if code is ExitCode.SUCCEEDED and checkpoint_dir and ending.had_last_round and applied > on_disk:
        logger.warning("the job has succeeded, and its last step %d is not saved: %s", applied, newest)
    elif code is ExitCode.SUCCEEDED:
        logger.info("the job has succeeded")
    elif code is ExitCode.DRAINED and on_disk >= 0:
        logger.info("the job has drained, step %d is committed%s: run it again to go on", on_disk, place)
    elif code is ExitCode.DRAINED and applied >= 0:
        logger.info("the job has drained before a step that would have to be saved: run it again to go on")
    elif code is ExitCode.DRAINED:
        logger.info("the job was stopped; %s", ending.last_words)
    elif code is ExitCode.STEPS_LOST and ending.is_in_memory:
        logger.error("stopped at step %d, and %s: the next start on this host has the rest in memory", applied, newest)
    elif code is ExitCode.STEPS_LOST:
        lost = "what lies between" if on_disk >= 0 else "what was trained"
        others = ", unless other nodes of the job have it in memory and go on" if config.max_nodes > 1 else ""
        remedy = "" if checkpoint_dir or on_disk >= 0 else "; give --checkpoint-dir to keep it"
        logger.error("stopped at step %d, and %s: %s is trained again%s%s", applied, newest, lost, others, remedy)
    elif ending.error is not None:
        logger.error("the job has failed here: %s", ending.error)
    elif ending.cause:
        logger.error("the job has failed: %s", ending.cause)
    elif (failure := ending.failure) is not None:
        logger.error(
            "the job has failed: rank %s %s: %s", failure.rank, failure.reason, failure.message.splitlines()[0]
        )
