"""Processes that each hold a share of the simulated nodes, and a coordinator that has them act at the same moment.

Owns the processes and what goes between them; what a node is comes from the `Party` that each process makes. Times are
of CLOCK_MONOTONIC, which is one clock for all processes of a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_END_SECONDS = 10.0
_SWITCH_SECONDS = (
    0.5  # so often does each thread that waits for its turn wake up: hundreds wait, and all give way anyway
)
_START_SECONDS = 60.0  # to import torch N times on two cores, and to make the nodes


class TooSlowError(Exception):
    """What was asked for did not happen within its time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process is to hold."""

    first: int  # node number
    count: int
    total: int  # of all processes
    run_id: str
    ttl_seconds: int
    port: int  # of the store
    is_host: bool  # of that store, where it is one that a node hosts

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


class Party(Protocol):
    """The nodes of one process. Its methods are called by the coordinator, and answer before `_END_SECONDS`."""

    def join(self) -> None:
        """All nodes ask to be in a round."""

    def lose(self) -> float:
        """One node, not the leader, is gone for all to see. Returns the moment just before it was."""

    def resume(self) -> None:
        """The others' workers have failed with that: they ask for the next round, where nobody tells them."""

    def formed(self, members: int, seconds: float) -> float | None:
        """Waits until each node here that is not lost sees a round of so many; when the last one did."""

    def counts(self) -> Mapping[str, int]:
        """What was done on the store so far."""


class Fleet:
    """A `with` of processes; `call` asks all of them at once."""

    def __init__(self, make: Callable[[Share], Party], shares: Sequence[Share]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes = []
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, make, share), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Fleet:
        try:
            self._answers(self._pipes, _START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, *arguments: Any, seconds: float = _END_SECONDS) -> list[Any]:
        """Each process's answer. Raises: TooSlowError, RuntimeError with the traceback of a process."""
        return self._ask(self._pipes, method, arguments, seconds)

    def call_first(self, method: str, *arguments: Any, seconds: float = _END_SECONDS) -> Any:
        return self._ask(self._pipes[:1], method, arguments, seconds)[0]

    def close(self) -> None:
        """As if their power had failed: nothing is said goodbye to, the store of this run goes as well."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_SECONDS)

    def _ask(
        self, pipes: Sequence[multiprocessing.connection.Connection], method: str, arguments: Any, seconds: float
    ) -> list[Any]:
        for pipe in pipes:
            pipe.send((method, arguments))
        return self._answers(pipes, seconds)

    def _answers(self, pipes: Sequence[multiprocessing.connection.Connection], seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        answers = []
        for pipe in pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TooSlowError(f"no answer within {seconds:g} s")
            answer, failure = pipe.recv()
            if failure:
                raise RuntimeError(f"a process of the fleet has failed:\n{failure}")
            answers.append(answer)
        return answers


def serve(pipe: multiprocessing.connection.Connection, make: Callable[[Share], Party], share: Share) -> None:
    """A process: do what it is told until the coordinator is gone. Its failure goes to the coordinator."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.disable()  # what hundreds of nodes keep would be looked through again and again, in one process
    with contextlib.suppress(EOFError, OSError):
        try:
            party = make(share)
            pipe.send((None, ""))
            while True:
                method, arguments = pipe.recv()
                pipe.send((getattr(party, method)(*arguments), ""))
        except (EOFError, OSError):
            raise
        except Exception:  # noqa: BLE001  the top of a process
            pipe.send((None, traceback.format_exc()))
    os._exit(0)  # hundreds of threads wait for a store that goes as well


def shares(total: int, processes: int, **settings: Any) -> list[Share]:
    """The nodes dealt out, two at least in each process; the first process hosts what nodes host."""
    count = max(1, min(processes, total // 2))
    sizes = [total // count + (number < total % count) for number in range(count)]
    firsts = [sum(sizes[:number]) for number in range(count)]
    return [
        Share(first=first, count=size, total=total, is_host=not first, **settings)
        for first, size in zip(firsts, sizes, strict=True)
    ]
