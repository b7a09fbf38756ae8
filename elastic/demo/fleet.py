"""The nodes of a demo: an agent each, with folders of their own, as if each were on a machine of its own.

They share what machines of a cluster would share: the checkpoint directory and the etcd. Ledger, losses and digest are
shared too; each line in them is one append.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from elastic.demo.job import Job
from elastic.status import JobStatus

NodeCommand = Callable[[str, Path], list[str]]  # node id, folder of the node -> the agent's command line


class Fleet:
    """Nodes by their ids. A node that was killed may be started again under its id; it then finds an empty disk."""

    def __init__(self, command: NodeCommand, folder: Path) -> None:
        self.folder = folder  # what the nodes share
        self._command = command
        self._jobs: dict[str, Job] = {}
        self._started = 0
        self._answers: dict[str, JobStatus | None] = {}  # of the last look

    @property
    def is_over(self) -> bool:
        """Every node has ended."""
        return all(job.is_over for job in self._jobs.values())

    @property
    def exit_codes(self) -> dict[str, int | None]:
        """None = it still runs."""
        return {node_id: job.exit_code for node_id, job in self._jobs.items()}

    def start(self, node_id: str) -> None:
        self._started += 1
        folder = self.folder / f"{self._started}-{node_id}"
        self._jobs[node_id] = Job(self._command(node_id, folder), folder)

    def kill(self, node_id: str) -> None:
        """As if its power had gone."""
        self._jobs[node_id].kill()

    def drain(self, node_id: str) -> None:
        """Ask it to leave, as `systemctl stop` would."""
        self._jobs[node_id].send(signal.SIGTERM)

    def status(self) -> JobStatus | None:
        """What the nodes say that know of the newest round; None while none of them answers."""
        self._answers = {node_id: job.status() for node_id, job in self._jobs.items() if not job.is_over}
        known = [answer for answer in self._answers.values() if answer is not None]
        return max(known, key=_newest, default=None)

    @property
    def is_warm(self) -> bool:
        """Whether, at the last look, a standby waited behind every worker of every node."""
        answers = self._answers.values()
        return all(answer is not None and all(worker.standby for worker in answer.workers) for answer in answers)

    def last_words(self) -> str:
        """The ends of the logs, those of nodes that failed first."""
        jobs = sorted(self._jobs.items(), key=lambda item: item[1].exit_code in (None, 0))
        told = [f"-- {node_id}, exit {job.exit_code}:\n{job.last_words()}" for node_id, job in jobs]
        return "\n".join(told)

    def stop(self) -> None:
        """End whatever still runs; bounded."""
        for job in self._jobs.values():
            job.send(signal.SIGQUIT)  # to all at once, so that they end beside each other
        for job in self._jobs.values():
            job.stop()


def _newest(status: JobStatus) -> tuple[int, int]:
    return status.round, max((worker.step or 0 for worker in status.workers), default=0)
