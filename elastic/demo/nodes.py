"""`elasticd demo --nodes N`: agents that meet in an etcd; one is killed and comes back, another one leaves.

The story is told by a generator: each look at the nodes hands it their newest status, and it acts when it is time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Generator
from pathlib import Path

from elastic.demo.etcd import find_etcd, running_etcd
from elastic.demo.fleet import Fleet
from elastic.demo.nodes_outcome import Change, Kind, NodesOutcome, read_nodes_run, read_parameter_difference
from elastic.demo.settings import pace_file
from elastic.demo.stage import DemoFailedError, Stage
from elastic.errors import ExitCode
from elastic.status import JobStatus, plural

_STEPS_BETWEEN = 8  # that are trained with one world size before the next change is made
# Seconds that a step is made longer by: what starts on a small machine is to have it for itself.
_FULL_SPEED = 0.0
_HELD_BACK = 0.5  # while nodes start
_WAITING = 1.0  # while standbys get warm
_LOADED = 8.0  # when that takes more than _STEPS_BETWEEN: others work on this machine
_MOST_STEPS_WAITED = 3 * _STEPS_BETWEEN  # about two minutes; then steps are needed for what follows

Story = Generator[None, JobStatus, None]


class NodesDemo:
    """A disturbed run of several agents, then an undisturbed one of one agent with as many workers."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._settings, self._say = stage, stage.settings, stage.screen.say
        self._changes: list[Change] = []
        self._pace_file = pace_file(stage.folder / "disturbed")

    def run(self) -> NodesOutcome:
        began = time.monotonic()
        settings = self._settings
        folder, reference = self._stage.folder / "disturbed", self._stage.folder / "reference"
        find_etcd()  # before anything is said
        self._say(f"training a small language model on {settings.data} on {plural(settings.nodes, 'node')}")
        folder.mkdir()
        self._pace(_HELD_BACK)
        with running_etcd(folder) as endpoint:
            fleet = Fleet(functools.partial(self._command, folder, endpoint), folder)
            self._disturbed(fleet)
        self._say(
            f"once more, in peace and at full speed: one agent with {plural(settings.world_size, 'worker')}, to compare"
        )
        self._stage.train_alone(reference.name)
        return NodesOutcome(
            settings=settings,
            changes=tuple(self._changes),
            disturbed=read_nodes_run(folder, settings),
            reference=read_nodes_run(reference, settings),
            difference=read_parameter_difference(folder, reference),
            seconds=time.monotonic() - began,
        )

    def _command(self, shared: Path, endpoint: str, node_id: str, own: Path) -> list[str]:
        return self._settings.node_command(node_id, endpoint, shared=shared, own=own)

    def _disturbed(self, fleet: Fleet) -> None:
        story = self._story(fleet)
        next(story)

        def go_on(status: JobStatus) -> None:
            with contextlib.suppress(StopIteration):  # all is told; the rest is only to be looked at
                story.send(status)

        with contextlib.ExitStack() as stack:
            stack.callback(fleet.stop)
            for number in range(1, self._settings.nodes + 1):
                fleet.start(f"n{number}")
            self._stage.watch(fleet, go_on)
        self._check_end(fleet)

    def _check_end(self, fleet: Fleet) -> None:
        if len(self._changes) < len(Kind):
            done = ", ".join(change.kind.value for change in self._changes) or "nothing"
            raise DemoFailedError(
                f"training was over before all had happened ({done} so far); give more --steps:\n{fleet.last_words()}"
            )
        left = {change.node_id for change in self._changes if change.kind is Kind.LEFT}
        wanted = {node_id: int(ExitCode.DRAINED if node_id in left else 0) for node_id in fleet.exit_codes}
        if fleet.exit_codes != wanted:
            raise DemoFailedError(f"the nodes ended with {fleet.exit_codes}, not {wanted}:\n{fleet.last_words()}")

    def _story(self, fleet: Fleet) -> Story:
        """Each `yield` waits for the next look."""
        whole, less = self._settings.world_size, self._settings.world_size - self._settings.workers
        status = yield
        while status.world_size != whole or _step(status) < self._settings.kill_at:
            status = yield
        status = yield from self._all_warm(fleet, status)
        victim = min(status.nodes, key=lambda node: node.node_rank).node_id  # it holds the round's store
        status = yield from self._change(Kind.LOST, victim, fleet, status, world_size=less)
        status = yield from self._trained(status)
        self._pace(_HELD_BACK)
        status = yield from self._change(Kind.JOINED, victim, fleet, status, world_size=whole)
        self._pace(_FULL_SPEED)
        status = yield from self._trained(status)
        status = yield from self._all_warm(fleet, status)
        others = [node for node in status.nodes if node.node_id != victim]
        leaver = max(others, key=lambda node: node.node_rank).node_id
        yield from self._change(Kind.LEFT, leaver, fleet, status, world_size=less)

    def _change(
        self, kind: Kind, node_id: str, fleet: Fleet, status: JobStatus, *, world_size: int
    ) -> Generator[None, JobStatus, JobStatus]:
        """Act, and wait until the world has that size and has done a step more."""
        step, before = _step(status), status.round
        self._say(f"  step {step}, {plural(status.world_size, 'rank')}: {_WORDS[kind].format(node_id)}")
        unix_time, was_cold = time.time(), kind is not Kind.JOINED and not fleet.is_warm
        {Kind.LOST: fleet.kill, Kind.JOINED: fleet.start, Kind.LEFT: fleet.drain}[kind](node_id)
        while not (status.round > before and status.world_size == world_size and _has_trained(status)):
            if any(waiting.node_id == node_id and "let in" in waiting.reason for waiting in status.waiting):
                self._pace(_FULL_SPEED)
            status = yield
        ranks = plural(world_size, "rank")
        self._say(f"  going on at step {(status.base_step or 0) + 1} with {ranks} in round {status.round}")
        self._changes.append(
            Change(
                kind=kind,
                node_id=node_id,
                step=step,
                unix_time=unix_time,
                round=status.round,
                world_size=world_size,
                was_cold=was_cold,
            )
        )
        return status

    def _trained(self, status: JobStatus) -> Generator[None, JobStatus, JobStatus]:
        """Wait until some more steps are done."""
        wanted = _step(status) + _STEPS_BETWEEN
        while _step(status) < wanted:
            status = yield
        return status

    def _all_warm(self, fleet: Fleet, status: JobStatus) -> Generator[None, JobStatus, JobStatus]:
        """Wait for the standbys, which are warm for nearly all of a long run, then get up to speed again."""
        began, pace = _step(status), _FULL_SPEED
        while not fleet.is_warm and not self._settings.is_late(_step(status)):
            waited = _step(status) - began
            if waited >= _MOST_STEPS_WAITED:
                break
            wanted = _WAITING if waited < _STEPS_BETWEEN else _LOADED
            if wanted != pace:
                self._pace(wanted)
                pace = wanted
            status = yield
        self._pace(_FULL_SPEED)
        return (yield from self._trained(status))

    def _pace(self, seconds: float) -> None:
        """Steps are longer by that from the next one on."""
        partial = self._pace_file.with_suffix(".new")
        partial.write_text(str(seconds))
        partial.replace(self._pace_file)


_WORDS = {
    Kind.LOST: "killed node {} with SIGKILL, agent and workers",
    Kind.JOINED: "started node {} again",
    Kind.LEFT: "asked node {} to leave with SIGTERM",
}


def _step(status: JobStatus) -> int:
    return min((worker.step or 0 for worker in status.workers), default=0)


def _has_trained(status: JobStatus) -> bool:
    return status.state == "running" and _step(status) > (status.base_step or 0)
