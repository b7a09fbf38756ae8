"""Steps that only this node's memory holds when its agent ends are committed: a job that has failed loses none of them.

The same for an agent that was killed, by whoever finds its memory: `elasticd give-back`, or the next agent.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from elastic.agent.crew import Crew
from elastic.agent.decide import Asked
from elastic.agent.mailbox import Mailbox, SignalReceived
from elastic.agent.orders import Orders
from elastic.agent.systemd import Notifier
from elastic.config import JobConfig
from elastic.errors import ExitCode
from elastic.own_checkpoints import own_checkpoints
from elastic.passing import start_thread

logger = logging.getLogger(__name__)
_NOTES = "owner.json"
_POLL_SECONDS = 1.0
_POLL_LEFT_SECONDS = 0.1


class Rescue:
    """Of one agent, at its end. What cannot be saved in time is lost, as it would be without this."""

    def __init__(self, *, config: JobConfig, crew: Crew, mailbox: Mailbox, notifier: Notifier) -> None:
        self._config, self._crew, self._mailbox, self._notifier = config, crew, mailbox, notifier
        self._is_leaving = False

    def run(self, ended: ExitCode, orders: Orders) -> ExitCode:
        """After the agent's loop, when no worker is left. Returns how the job has ended after all."""
        config, crew = self._config, self._crew
        if ended is ExitCode.SUCCEEDED or orders.asked is Asked.STOP or crew.applied_step <= crew.disk_step:
            return ended
        if crew.memory_dir is None or config.checkpoint_dir is None:
            return ended
        self._is_leaving = orders.is_leaving
        began = time.monotonic()
        deadline = (orders.asked_at or began) + config.drain_grace_seconds
        if deadline <= began:  # its drain has taken all the time there was
            return ended
        save = partial(
            _save,
            crew.memory_dir,
            config.checkpoint_dir,
            config.run_id,
            is_first=crew.has_rank_0,
            patience_seconds=deadline - began,
        )
        step = self._await(_begin(save, self._mailbox.wake), deadline)
        crew.disk_step = max(crew.disk_step, step)
        is_saved = crew.applied_step <= crew.disk_step
        return ExitCode.DRAINED if ended is ExitCode.STEPS_LOST and is_saved else ended

    def _await(self, saving: Future[int], deadline: float) -> int:
        """The step that is saved; -1: none, in time."""
        while not saving.done():
            self._notifier.saving()
            events = self._mailbox.wait(min(deadline, time.monotonic() + _POLL_SECONDS))
            signals = [event.number for event in events if isinstance(event, SignalReceived)]
            if time.monotonic() >= deadline or any(self._gives_up(number) for number in signals):
                logger.warning("what memory alone holds is given up")
                return -1
        return saving.result()

    def _gives_up(self, number: signal.Signals) -> bool:
        """QUIT does, and TERM or INT when the end had been asked for before."""
        if number not in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            return False
        logger.info("received %s", number.name)
        was_leaving, self._is_leaving = self._is_leaving, True
        return was_leaving or number == signal.SIGQUIT


def note_owner(folder: Path, config: JobConfig) -> None:
    """Whose memory it is, for who finds it when this agent has been killed. Of many nodes the others have it all."""
    if config.rdzv_backend == "standalone" and config.checkpoint_dir is not None:
        notes = {"run_id": config.run_id, "directory": config.checkpoint_dir, "seconds": config.drain_grace_seconds}
        (folder / _NOTES).write_text(json.dumps(notes))


def rescue_what_is_left(folder: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """The memory of an agent that was killed; its workers are dead."""
    try:
        notes = json.loads((folder / _NOTES).read_text())
        run_id, directory, seconds = str(notes["run_id"]), str(notes["directory"]), float(notes["seconds"])
    except (OSError, ValueError, TypeError, KeyError):
        return
    deadline = time.monotonic() + seconds
    saving = _begin(partial(_save, str(folder), directory, run_id), lambda: None)
    while not saving.done() and time.monotonic() < deadline:
        pause(_POLL_LEFT_SECONDS)


def _begin(save: Callable[[], int], ended: Callable[[], None]) -> Future[int]:
    """On a thread that may be left behind: a file server may never answer."""
    result: Future[int] = Future()

    def run() -> None:
        try:
            result.set_result(save())
        except Exception as exc:  # noqa: BLE001 - the top of a thread; it is told where the result is asked for
            result.set_exception(exc)
        ended()

    try:
        start_thread(threading.Thread(target=run, name="rescue", daemon=True))
    except OSError as exc:
        logger.warning("what memory alone holds is lost: %s", exc)
        result.set_result(-1)
    return result


def _save(folder: str, directory: str, run_id: str, *, is_first: bool = True, patience_seconds: float = 0.0) -> int:
    """The step that has been saved; -1: there was none to save, or it could not be."""
    try:
        rescued = own_checkpoints("rescue").rescue(
            folder, directory, run_id, is_first=is_first, patience_seconds=patience_seconds
        )
    except (own_checkpoints("errors").CheckpointError, OSError) as exc:
        logger.warning("what memory alone holds could not be saved: %s", exc)
        return -1
    if rescued is None:
        return -1
    logger.info("step %d, which memory alone held, is saved as %s", rescued.step, rescued.path)
    return int(rescued.step)
