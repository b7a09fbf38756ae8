"""Where the workers' output goes: torch's LogsSpecs and tails, one folder per round, never deleted by a restart."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from string import Template
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.run import _get_logs_specs_class

from elastic.config import JobConfig
from elastic.errors import UsageError
from elastic.passing import is_away, lacks_room, start_thread
from elastic.runtime import closed_to_others

logger = logging.getLogger(__name__)

_LINGER_SECONDS = 10.0  # a worker that is in the middle of a step opens its new file when that is over


def make_logs_specs(config: JobConfig, fallback: Path) -> LogsSpecs:
    """torch's LogsSpecs for the job. Without --log-dir only error files are written, below `fallback`.

    With --log-dir and neither --redirects nor --tee, both streams are teed: the console shows them and a file per rank
    and round keeps them. Raises: UsageError when the folder cannot be made. OSError: its file server is away.
    """
    redirects, tee = Std.from_str(config.redirects), Std.from_str(config.tee)
    if config.log_dir and redirects == Std.NONE and tee == Std.NONE:
        tee = Std.ALL
    ranks = {int(rank) for rank in config.local_ranks_filter.split(",")} if config.local_ranks_filter else None
    try:
        return _get_logs_specs_class(config.logs_specs)(
            log_dir=config.log_dir or str(fallback), redirects=redirects, tee=tee, local_ranks_filter=ranks
        )
    except (OSError, ValueError) as exc:
        if isinstance(exc, OSError) and (is_away(exc) or lacks_room(exc)):
            raise
        raise UsageError(f"--log-dir {config.log_dir}: {exc}") from exc


class Console:
    """Copies the log files of one round to the agent's own streams, and matching lines to the filtered files."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._template = config.log_line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        self._tails: list[TailLog] = []
        self._files: list[TextIO] = []
        self._stopping: list[threading.Thread] = []
        self._is_over = threading.Event()
        self._round: tuple[LogsDest, Mapping[int, Mapping[str, str]]] | None = None
        self._inodes: dict[str, int] = {}  # of the files that are followed

    def follow_rotated(self) -> None:
        """Go on with the new files where those of before were moved away; what is left of them is copied as well."""
        if self._round is not None and _are_other_files(self._inodes):
            there = self._round
            self.stop(linger_seconds=_LINGER_SECONDS)
            self.start(*there)

    def start(self, destination: LogsDest, environs: Mapping[int, Mapping[str, str]]) -> None:
        """Begin with a round's files; the last round's are stopped first."""
        self.stop()
        self._round = destination, environs
        self._inodes = _made([*destination.tee_stdouts.values(), *destination.tee_stderrs.values()])
        prefixes = self._prefixes(environs)
        role = self._config.role
        self._tails = [
            TailLog(role, destination.tee_stdouts, sys.stdout, prefixes),
            TailLog(role, destination.tee_stderrs, sys.stderr, prefixes),
        ]
        if needles := self._config.duplicate_stdout_filters:
            self._filter(destination.tee_stdouts, destination.filtered_stdout, needles, prefixes)
        if needles := self._config.duplicate_stderr_filters:
            self._filter(destination.tee_stderrs, destination.filtered_stderr, needles, prefixes)
        try:
            for tail in self._tails:
                tail.start()
        except RuntimeError as exc:  # no room for a thread
            logger.warning("this round's output is not copied, or not all of it: %s; it is in --log-dir", exc)

    def _filter(
        self, sources: dict[int, str], target: str, needles: tuple[str, ...], prefixes: dict[int, str] | None
    ) -> None:
        file = open(target, "a", errors="replace", buffering=1, opener=closed_to_others)  # noqa: SIM115 - see `stop`
        self._files.append(file)
        matches = lambda line: any(needle in line for needle in needles)  # noqa: E731
        self._tails.append(TailLog(self._config.role, sources, file, prefixes, log_line_filter=matches))

    def _prefixes(self, environs: Mapping[int, Mapping[str, str]]) -> dict[int, str] | None:
        if not self._template:
            return None
        return {
            local_rank: Template(self._template).safe_substitute(
                role_name=self._config.role, rank=environ["RANK"], local_rank=local_rank, hostname=socket.gethostname()
            )
            for local_rank, environ in environs.items()
        }

    def stop(self, linger_seconds: float = 0.0) -> None:
        """No more lines will come, after that time: what is left is copied by a thread, for a tail is slow to end."""
        if self._tails:
            finish = partial(_finish, self._tails, self._files, partial(self._is_over.wait, linger_seconds))
            thread = threading.Thread(target=finish, name="log-tails")
            try:
                start_thread(thread)
            except OSError:  # then the loop waits the moment that a tail takes to end
                _finish(self._tails, self._files, lambda: None)
            else:
                self._stopping = [t for t in self._stopping if t.is_alive()] + [thread]
            self._tails, self._files, self._round = [], [], None

    def close(self) -> None:
        self._is_over.set()
        self.stop()
        for thread in self._stopping:
            thread.join(10)
        self._stopping = []


def _made(paths: list[str]) -> dict[str, int]:
    """The inode of each file, made now where its worker has not done so yet."""
    inodes = {}
    for path in paths:
        with contextlib.suppress(OSError), open(path, "ab", opener=closed_to_others) as file:
            inodes[path] = os.fstat(file.fileno()).st_ino
    return inodes


def _are_other_files(inodes: Mapping[str, int]) -> bool:
    """Whether every file that says something is another one than before: who reads one again would tell it twice."""
    is_another = False
    for path, inode in inodes.items():
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116
            if status.st_ino == inode:
                if status.st_size:
                    return False
                continue
        is_another = True
    return is_another


def _finish(tails: list[TailLog], files: list[TextIO], linger: Callable[[], object]) -> None:
    linger()
    for tail in tails:
        tail.stop()
    for file in files:
        file.close()
