"""Which worker failed first, and what is known of it: exit code or signal, traceback, last log lines."""

from __future__ import annotations

import functools
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic.agent.hang import Verdict
from elastic.agent.hints import hint_for
from elastic.agent.oom import oom_kills
from elastic.agent.workers import Worker, signal_name
from elastic.status import FailureStatus

_LOG_LINES = 20
_TOLD_CHARACTERS = 4000  # of the beginning, and of the end
_LOG_BYTES = 8192
_LINE_CHARACTERS = 200  # of a first line that was put together
_OOM_HINT = (
    "`dmesg` for whose limit was full, the host's or the cgroup's (memory.max); fewer loader workers, a smaller "
    "micro_batch_size"
)

# What a rank says when a peer has gone: the peer's own failure is the cause, this is its consequence. What Python says
# of a pipe or socket of the script's own begins with [Errno N].
_COMMUNICATION_ERROR = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError|NCCL error|NCCL communicator was"
    r"|gloo[/\\].*|(?<!Errno 104\] )Connection (closed|reset) by (remote )?peer|connectFullMesh"
    r"|(?<!Errno 32\] )Broken pipe|recvBytes|Socket Timeout"
    r"|Timed out waiting \d+ms for (send|recv) operation",
    re.IGNORECASE,
)


def read_error_file(path: str) -> tuple[str, str]:
    """Exception line and traceback from torch's error file; empty where there is none or it is damaged."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return "", ""
    message, callstack = _parse_error_file(path, status.st_mtime_ns, status.st_size)
    return _cut(message), _cut(callstack)


def _cut(text: str) -> str:
    """An exception may hold a tensor in full; what is said of it is searched, logged and told to all nodes."""
    if len(text) <= 2 * _TOLD_CHARACTERS:
        return text
    left_out = len(text) - 2 * _TOLD_CHARACTERS
    return f"{text[:_TOLD_CHARACTERS]} ... ({left_out:,} characters left out) ... {text[-_TOLD_CHARACTERS:]}"


def in_one_line(message: str) -> str:
    """What an exception says, for summaries: its first line, and after a colon what comes below it."""
    first, *rest = message.splitlines() or [""]
    for line in rest:
        is_whole = not first.rstrip().endswith(":") or len(first) >= _LINE_CHARACTERS
        if is_whole or line.startswith("Traceback (most recent call last)"):
            break
        if line.strip():
            joined = f"{first.rstrip()} {line.strip()}"
            first = joined if len(joined) <= _LINE_CHARACTERS else f"{joined[:_LINE_CHARACTERS]}..."
    return first


@functools.lru_cache(maxsize=64)  # asked for in each pass
def _parse_error_file(path: str, _modified: int, _size: int) -> tuple[str, str]:
    try:
        raw: Any = json.loads(Path(path).read_text(errors="replace"))
        message = raw["message"]
        if isinstance(message, str):
            return message, ""
        extra = message.get("extraInfo")
        return str(message["message"]), str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", ""


def for_torch(failed: Sequence[Worker]) -> dict[int, ProcessFailure]:
    """The failures as torch's RunResult wants them, by rank. torch raises on an error file that it cannot read."""
    found = {}
    for worker in failed:
        found[worker.plan.rank] = ProcessFailure(
            local_rank=worker.plan.local_rank,
            pid=worker.pid,
            exitcode=worker.exit_code or 1,
            error_file=worker.plan.error_file if _torch_can_read(worker.plan.error_file) else "",
        )
    return found


def _torch_can_read(path: str) -> bool:
    try:
        message = json.loads(Path(path).read_text())["message"]
        return isinstance(message, str) or int(message["extraInfo"]["timestamp"]) >= 0
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def is_consequence(worker: Worker) -> bool:
    """Whether the worker only reports that a peer went away. A signal is never a consequence."""
    if worker.exit_code is None or worker.exit_code < 0:
        return False
    return tells_of_a_peer(read_error_file(worker.plan.error_file)[0])


def tells_of_a_peer(message: str) -> bool:
    """Whether an exception says that a peer has gone."""
    return bool(_COMMUNICATION_ERROR.search(message))


def first_failure(failed: Sequence[Worker]) -> Worker | None:
    """The earliest failure that is not a consequence; the earliest of all when each is."""
    in_order = sorted(failed, key=lambda worker: (is_consequence(worker), worker.exited_at))
    return in_order[0] if in_order else None


def last_lines(*paths: str) -> str:
    """The last lines of the first of these log files that has any."""
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError:
            continue
        if lines:
            return "\n".join(lines)
    return ""


def describe(worker: Worker, node_id: str, oom_kills_before: int) -> FailureStatus:
    """The failure as every view of the job shows it."""
    code = worker.exit_code or 0
    message, callstack = (text.strip() for text in read_error_file(worker.plan.error_file))
    was_oom = oom_kills() > oom_kills_before
    reason, name, hint = "exited", None, hint_for(message)
    if code < 0:
        reason, name = "killed", signal_name(-code)
        message = message or f"killed by {name}"
        if -code == signal.SIGKILL and was_oom:
            reason, message, hint = "out of memory", "killed by the kernel's OOM killer", _OOM_HINT
    elif was_oom:
        hint = f"the kernel's OOM killer has killed a process of this job meanwhile: {_OOM_HINT}"
    first = in_one_line(message) or f"exited with {code}"
    rest = "\n".join(message.splitlines()[1:])
    look = f"look at: {hint}" if hint else ""
    return FailureStatus(
        rank=worker.plan.rank,
        node_id=node_id,
        reason=reason,
        exit_code=code if code >= 0 else None,
        signal=name,
        message="\n".join(part for part in (first, rest, look, callstack) if part),
        log=last_lines(worker.plan.stderr, worker.plan.stdout),
    )


def describe_hung(verdict: Verdict, workers: Sequence[Worker], node_id: str) -> FailureStatus:
    """A hang as every view of the job shows it; called when the stacks have been written."""
    logs = [path for w in workers if w.plan.rank == verdict.rank for path in (w.plan.stderr, w.plan.stdout)]
    return FailureStatus(
        rank=verdict.rank, node_id=node_id, reason="hung", message=verdict.message, log=last_lines(*logs)
    )
