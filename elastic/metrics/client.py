"""Asks the agents of this host for their status, and tells one what to do, by the sockets of the runtime directory."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from elastic import runtime
from elastic.errors import ElasticError
from elastic.pidfd import open_pidfd, send_signal
from elastic.status import JobStatus

logger = logging.getLogger(__name__)

_ASK_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundAgent:
    """An agent that answered."""

    pid: int
    socket: Path
    status: JobStatus


def find_agents(environ: Mapping[str, str], run_id: str | None = None) -> list[FoundAgent]:
    """Every agent of this host that answers, by pid; with `run_id` those of that job. Stale sockets are skipped."""
    answers = [_ask(path) for path in runtime.sockets(environ)]
    agents = [agent for agent in answers if agent is not None and run_id in (None, agent.status.run_id)]
    return sorted(agents, key=lambda agent: agent.pid)


class NoAnswerError(ElasticError):
    """The agent is there, and says nothing in time."""


class Draining(NamedTuple):
    """What an agent answers that is to drain."""

    already: bool  # somebody has asked before
    seconds: float | None  # that it may still take; None: it does not say


def drain(agent: FoundAgent) -> Draining:
    """Asks the agent to drain; asked again it goes on with it. Raises: ElasticError when it is gone or not ours."""
    try:
        code, text = command(agent, "/drain", {})
    except NoAnswerError:
        code, text = 501, ""
    if code in (404, 501):  # of before an upgrade, or frozen: a signal waits for it
        _terminate(agent)
    if code in (404, 501, 503):  # too busy: it has heard, and does it as soon as it can
        return Draining(already=False, seconds=None)
    if code != 200:
        raise ElasticError(f"agent {agent.pid}: {text.strip()}")
    told = json.loads(text)
    return Draining(already=told["already"], seconds=told["seconds"])


def _terminate(agent: FoundAgent) -> None:
    """SIGTERM to exactly the process that listens on the agent's socket, whatever became of its pid since.

    Raises: ElasticError when it is gone or not ours to signal.
    """
    try:
        with runtime.connect(agent.socket, _ASK_SECONDS) as connection:
            pid = _listener_pid(connection)
            pidfd = open_pidfd(pid)
            try:
                # The connection still stands, so the pid was its listener's when the descriptor was made.
                if _get_status(connection) is None:
                    raise ElasticError(f"process {agent.pid} does not answer as an elasticd agent; not signalled")
                if pidfd is None:  # the next best: it answered just now
                    os.kill(pid, signal.SIGTERM)
                else:
                    send_signal(pidfd, signal.SIGTERM)
            finally:
                if pidfd is not None:
                    os.close(pidfd)
    except (ConnectionError, FileNotFoundError, ProcessLookupError) as exc:
        raise ElasticError(f"agent {agent.pid} is gone") from exc
    except OSError as exc:
        raise ElasticError(f"cannot signal agent {agent.pid}: {exc.strerror or exc}") from exc


def ask(agent: FoundAgent) -> JobStatus | None:
    """Its status as of now; None when it is gone or does not answer."""
    try:
        with runtime.connect(agent.socket, _ASK_SECONDS) as connection:
            return _get_status(connection)
    except OSError:
        return None


class Ended(NamedTuple):
    """How an agent has ended; the steps are -1 where there is none."""

    exit_code: int
    step: int
    committed_step: int


def wait_for_end(agent: FoundAgent) -> Ended | None:
    """However long it takes. None: it could not say, as one that is killed, or is of before an upgrade."""
    try:
        code, text = command(agent, "/end", {}, seconds=None)
        return Ended(**json.loads(text)) if code == 200 else None
    except (ElasticError, ValueError, TypeError):
        return None


def command(
    agent: FoundAgent, path: str, arguments: Mapping[str, str], *, seconds: float | None = _ASK_SECONDS
) -> tuple[int, str]:
    """A command on the agent's socket: (code, text) as it answers within the time, None: whenever it does.

    Raises: ElasticError when it does not.
    """
    try:
        with runtime.connect(agent.socket, _ASK_SECONDS) as connection:
            connection.settimeout(seconds)
            request = http.client.HTTPConnection("localhost")
            request.sock = connection
            request.request("POST", f"{path}?{urlencode(arguments)}")
            with request.getresponse() as response:
                return response.status, response.read().decode(errors="replace")
    except (ConnectionError, FileNotFoundError) as exc:
        raise ElasticError(f"agent {agent.pid} is gone") from exc
    except (OSError, http.client.HTTPException) as exc:
        raise NoAnswerError(f"agent {agent.pid} does not answer: {exc}") from exc


def _ask(path: Path) -> FoundAgent | None:
    """The agent behind a socket; None when nobody, or nobody who speaks as an agent, listens there."""
    try:
        with runtime.connect(path, _ASK_SECONDS) as connection:
            pid = _listener_pid(connection)
            status = _get_status(connection)
    except TimeoutError:
        logger.warning("%s: somebody listens but does not answer within %g s; a frozen agent?", path, _ASK_SECONDS)
        return None
    except OSError:
        return None
    return None if status is None else FoundAgent(pid=pid, socket=path, status=status)


def _listener_pid(connection: socket.socket) -> int:
    """Linux keeps with a unix socket who called listen() on it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def _get_status(connection: socket.socket) -> JobStatus | None:
    request = http.client.HTTPConnection("localhost")
    request.sock = connection
    try:
        request.request("GET", "/status")
        with request.getresponse() as response:
            return JobStatus.from_json(json.load(response)) if response.status == 200 else None
    except (http.client.HTTPException, ValueError):
        return None
