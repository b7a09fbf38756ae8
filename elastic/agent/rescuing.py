"""Steps that only this node's memory holds when its agent ends are committed: a job that has failed loses none of them.

The same for an agent that was killed, by whoever finds its memory: `elasticd give-back`, or the next agent. What cannot
be saved for a reason that may pass stays where it is, for the next who comes; the job's next agent goes on with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from elastic.agent.crew import Crew
from elastic.agent.decide import Asked
from elastic.agent.mailbox import Mailbox, SignalReceived
from elastic.agent.memory import free_memory, is_kept, keep_memory
from elastic.agent.orders import Orders
from elastic.agent.systemd import Notifier
from elastic.config import JobConfig
from elastic.errors import ExitCode
from elastic.own_checkpoints import own_checkpoints
from elastic.passing import begin, is_away, is_full

logger = logging.getLogger(__name__)
_OWNER = "owner.json"
_OWNER_LATER = ".owner.json"  # of many nodes: for as long as they train the others have it all
_RESCUING = "rescuing"  # somebody is at it, who holds the folder's lock
_POLL_SECONDS = 1.0
_POLL_LEFT_SECONDS = 0.1
_FOREIGN_SECONDS = 10.0  # that a start spends on what another job has left


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """`step`: the newest that the directory has, -1 for none. `is_settled`: nothing is left to be saved; `is_sound`:
    what is left is of use to the job, though it could not be saved now."""

    step: int = -1
    is_settled: bool = False
    is_sound: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Notes:
    """Whose memory it is. `place`: the directory however it is spelled; `seconds`: that a save may take."""

    run_id: str
    directory: str
    place: str
    seconds: float

    @property
    def home(self) -> str:
        """Where the job's steps belong: where it was, whatever a link of that name leads to by now."""
        return self.place if Path(self.place).is_dir() else self.directory


class Rescue:
    """Of one agent, at its end."""

    def __init__(self, *, config: JobConfig, crew: Crew, mailbox: Mailbox, notifier: Notifier) -> None:
        self._config, self._crew, self._mailbox, self._notifier = config, crew, mailbox, notifier
        self._is_leaving = False
        self.is_kept = False  # memory holds steps for the next start
        own_checkpoints("rescue")  # while it is there: a package may be replaced under a running job

    def run(self, ended: ExitCode, orders: Orders, serve: Callable[[list[Any]], None]) -> ExitCode:
        """After the agent's loop, when no worker is left. Returns how the job has ended after all.

        `serve` answers who asks the agent meanwhile.
        """
        config, crew = self._config, self._crew
        folder = Path(crew.memory_dir) if crew.memory_dir else None
        was_kept = folder is not None and is_kept(folder)  # by an agent before, whose steps it may still hold
        is_behind = crew.applied_step > crew.disk_step
        if was_kept and crew.applied_step < 0 and ended is not ExitCode.SUCCEEDED:  # nobody has come to use it
            return ended
        if orders.asked is Asked.STOP or (ended is ExitCode.SUCCEEDED and not is_behind):
            return _freed(folder, ended)
        if config.checkpoint_dir is None or not (is_behind or was_kept):
            return ended
        began = time.monotonic()
        deadline = (orders.asked_at or began) + config.drain_grace_seconds
        if deadline <= began:  # its drain has taken all the time there was
            self._leave_it(folder)
            return ended
        self._is_leaving = orders.is_leaving
        if folder is not None:
            begin_rescue(folder)
        save = partial(
            _save,
            folder,
            config.checkpoint_dir,
            config.run_id,
            deadline=deadline,
            is_first=crew.has_rank_0,
            is_alone=config.rdzv_backend == "standalone",
        )
        result = self._await(_begin(save, self._mailbox.wake), deadline, serve)
        if result.is_settled:
            _freed(folder, ended)
        else:
            self._leave_it(folder)
        crew.disk_step = max(crew.disk_step, result.step)
        is_saved = crew.applied_step <= crew.disk_step
        if ended is ExitCode.SUCCEEDED and self.is_kept:
            return ExitCode.STEPS_LOST
        return ExitCode.DRAINED if ended is ExitCode.STEPS_LOST and is_saved else ended

    def _leave_it(self, folder: Path | None) -> None:
        """To the next start, where there is anything."""
        if folder is not None and self._config.checkpoint_dir and any(folder.glob("rank-*-slot-*")):
            begin_rescue(folder)
            self.is_kept = _keep(folder, self._config.run_id, self._config.checkpoint_dir)

    def _await(self, saving: Future[_Result], deadline: float, serve: Callable[[list[Any]], None]) -> _Result:
        while not saving.done():
            self._notifier.saving()
            events = self._mailbox.wait(min(deadline, time.monotonic() + _POLL_SECONDS))
            serve(events)
            if any(self._gives_up(event.number) for event in events if isinstance(event, SignalReceived)):
                logger.warning("%s is given up", _what(self._crew.memory_dir, self._config.run_id))
                return _Result(is_settled=True)
            if time.monotonic() >= deadline:
                what = _what(self._crew.memory_dir, self._config.run_id)
                logger.warning("%s could not be saved within --drain-grace", what)
                return _Result()
        return saving.result()

    def _gives_up(self, number: signal.Signals) -> bool:
        """QUIT does, and TERM or INT when the end had been asked for before."""
        if number not in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            return False
        logger.info("received %s", number.name)
        was_leaving, self._is_leaving = self._is_leaving, True
        return was_leaving or number == signal.SIGQUIT


def _freed(folder: Path | None, ended: ExitCode) -> ExitCode:
    """`ended`, with nothing in memory that anybody needs."""
    if folder is not None:
        free_memory(folder)
    return ended


def newest_round_in(folder: Path, run_id: str) -> int:
    """The highest round of which anything lies in memory; 0 for none."""
    rounds = own_checkpoints("rounds").read_rounds(own_checkpoints("storage").LocalStorage(), str(folder))
    held = own_checkpoints("held").held_in(folder, run_id)
    return int(max([0, *(round_ for round_, _ in rounds), *(whole.mark.round for whole in held)]))


def note_owner(folder: Path, config: JobConfig) -> None:
    """Whose memory it is, for who finds it without its agent. At the start, when there is room for it."""
    directory = config.checkpoint_dir
    if directory is None:
        return
    # The place is looked for now: who finds the memory may be another job, and this file server be away by then.
    notes = _Notes(
        run_id=config.run_id, directory=directory, place=_place(directory), seconds=config.drain_grace_seconds
    )
    later = folder / _OWNER_LATER
    try:
        later.write_text(json.dumps(dataclasses.asdict(notes)))
        if config.max_nodes == 1:
            begin_rescue(folder)
    except OSError as exc:
        with contextlib.suppress(OSError):  # what it was taken over with still says whose it is
            later.unlink()
        logger.warning("%s: %s: steps that memory alone holds would go with this agent", folder, exc.strerror or exc)


def begin_rescue(folder: Path) -> None:
    """Who finds it from now on is to save it."""
    with contextlib.suppress(OSError):
        (folder / _OWNER_LATER).rename(folder / _OWNER)


class Finder:
    """Whoever comes upon the memory of agents that are gone; see `memory.sweep`.

    `config`: of an agent that is about to start, for which it waits; None: of nobody.
    """

    def __init__(self, config: JobConfig | None = None, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._config, self._pause = config, pause
        self._waits_until: float | None = None
        self._others_until = 0.0
        self._taken_over: Path | None = None

    def may_free(self, folder: Path) -> bool:
        """Save what is in there; whether that is not needed any more. Its agent's workers are dead."""
        notes = _read_notes(folder)
        if notes is None and (folder / _OWNER).exists() and any(folder.glob("rank-*-slot-*")):
            logger.warning(
                "%s holds steps, and %s does not say whose: remove the folder to give them up", folder, _OWNER
            )
            return False
        if notes is None:
            return True
        (folder / _RESCUING).touch()
        is_ours = self._is_ours(notes)
        can_stay = is_ours and self._taken_over is None and self._can_go_on_with(folder, notes)
        deadline = self._deadline(notes, is_ours)
        save = partial(
            _save,
            *(folder, notes.home, notes.run_id),
            deadline=deadline,
            is_alone=True,
            is_patient=is_ours and not can_stay,
        )
        saving = _begin(save)
        while not saving.done() and time.monotonic() < deadline:
            self._pause(_POLL_LEFT_SECONDS)
        result = saving.result() if saving.done() else _Result(is_sound=True)
        if can_stay and result.is_sound:
            self._taken_over = folder
            logger.warning(
                "%s could not be saved to %s: this start goes on from it in memory",
                *(_what(folder, notes.run_id), notes.home),
            )
        elif not result.is_settled:
            _keep(folder, notes.run_id, notes.home)
            if is_ours:
                logger.warning(
                    "this start goes on from what is on disk: to have that step, stop it and see to the disk"
                )
        return result.is_settled

    def _deadline(self, notes: _Notes, is_ours: bool) -> float:
        """For its own job's a start has the patience that it was told to have; for all others together a moment."""
        now = time.monotonic()
        if self._config is None:
            return now + notes.seconds
        if is_ours:
            return now + self._config.drain_grace_seconds
        self._others_until = self._others_until or now + _FOREIGN_SECONDS
        return min(now + notes.seconds, self._others_until)

    def takes_over(self, folder: Path) -> bool:
        if folder != self._taken_over:
            return False
        with contextlib.suppress(OSError):
            (folder / _RESCUING).unlink()
        return True

    def _can_go_on_with(self, folder: Path, notes: _Notes) -> bool:
        """Whether our workers can begin in that memory, as those before them did after each failure."""
        config = self._config
        if config is None or not config.memory_checkpoints or config.max_nodes > 1 or notes.run_id != config.run_id:
            return False
        held = own_checkpoints("held").held_in(folder, notes.run_id)
        return bool(held) and all(len(whole.shares) == config.nproc_per_node for whole in held)

    def waits_for(self, folder: Path) -> bool:
        """It is held by another process: whether that saves what our job is to go on from. Then a moment has passed."""
        notes = _read_notes(folder)
        if notes is None or not (folder / _RESCUING).exists() or not self._is_ours(notes):
            return False
        if self._waits_until is None:
            logger.info(
                "waiting for another process, which saves what memory alone holds of this job, up to %g s",
                notes.seconds,
            )
            self._waits_until = time.monotonic() + notes.seconds
        if time.monotonic() >= self._waits_until:
            logger.warning("another process has not saved what lies in %s: going on without it", folder)
            return False
        self._pause(_POLL_LEFT_SECONDS)
        return True

    def _is_ours(self, notes: _Notes) -> bool:
        """Whether our job is to go on from there."""
        directory = self._config.checkpoint_dir if self._config is not None else None
        return directory is not None and _place(directory) == notes.place


def _place(directory: str) -> str:
    local = own_checkpoints("storage").local_path(directory)
    return directory if local is None else os.path.realpath(local)


def _keep(folder: Path, run_id: str, directory: str) -> bool:
    """Whether it stays."""
    what = _what(folder, run_id)
    try:
        if _read_notes(folder) is None:
            raise OSError(errno.ENOSPC, "there was no room to note whose it is")
        keep_memory(folder)
    except OSError as exc:
        logger.warning("%s cannot stay in %s: %s", what, folder, exc.strerror or exc)
        return False
    logger.warning(
        "%s stays in %s: the next start tries again to save it to %s; remove it from there to give it up",
        *(what, folder, directory),
    )
    return True


def _what(folder: str | Path | None, run_id: str) -> str:
    """What is spoken of: the newest step that is whole there."""
    with contextlib.suppress(OSError):
        found = own_checkpoints("held").held_in(Path(folder), run_id) if folder is not None else []
        if found:
            return f"step {max((whole.mark.round, whole.mark.step) for whole in found)[1]}, which memory alone holds,"
    return "what memory alone holds"


def _read_notes(folder: Path) -> _Notes | None:
    """None: there is nothing to save."""
    try:
        told = json.loads((folder / _OWNER).read_text())
        notes = _Notes(
            run_id=told["run_id"],
            directory=told["directory"],
            place=told.get("place", told["directory"]),
            seconds=float(told["seconds"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return notes if all(isinstance(name, str) for name in (notes.run_id, notes.directory, notes.place)) else None


def _begin(save: Callable[[], _Result], ended: Callable[[], None] = lambda: None) -> Future[_Result]:
    """Its result is no exception: what goes wrong is said here."""

    def safely() -> _Result:
        try:
            return save()
        except Exception:
            logger.exception("what memory alone holds could not be saved")
            return _Result()

    try:
        return begin(safely, "rescue", ended)
    except OSError as exc:
        logger.warning("what memory alone holds cannot be saved: %s", exc)
        failed: Future[_Result] = Future()
        failed.set_result(_Result(is_sound=True))
        return failed


def _save(
    folder: Path | None,
    directory: str,
    run_id: str,
    *,
    deadline: float,
    is_first: bool = True,
    is_alone: bool,
    is_patient: bool = True,
) -> _Result:
    """Where the reason may pass it is tried until the deadline, or once where nobody `is_patient`.

    Without a folder the directory is looked at alone.
    """
    what = f"{_what(folder, run_id)} could not be saved" if folder else "what is on disk could not be looked at"
    rescue, errors = own_checkpoints("rescue").rescue, own_checkpoints("errors")
    was_told = False
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            saved = rescue(
                *(folder, directory, run_id),
                is_first=is_first,
                is_alone=is_alone,
                patience_seconds=left,
                is_told=was_told,
            )
        except errors.StaleRoundError as exc:
            logger.warning("%s is of no use any more: %s", _what(folder, run_id), exc)
            return _Result(is_settled=True)
        except errors.CheckpointError as exc:
            logger.warning("%s: %s", what, exc)
            return _Result(is_sound=not isinstance(exc, errors.ForeignDirectoryError))
        except OSError as exc:
            is_last = not is_patient or left < _POLL_SECONDS or not (is_away(exc) or is_full(exc))
            if is_last or not was_told:
                logger.warning("%s: %s", what, exc)
            if is_last:
                return _Result(is_sound=True)
            was_told = True
            time.sleep(_POLL_SECONDS)
            continue
        if saved is not None and saved.is_new:
            logger.info("step %d, which memory alone held, is saved as %s", saved.step, saved.path)
        return _Result(step=saved.step if saved is not None else -1, is_settled=True)
