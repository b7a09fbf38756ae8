"""Run `elasticd run` as a user would and look at it from outside; nothing of it outlives the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from elastic import runtime

T = TypeVar("T")
MARK = "JOB_TEST_MARK"


class WaitTimeoutError(AssertionError):
    """A condition did not come true in time."""


def wait_for(condition: Callable[[], T], *, seconds: float = 30.0, what: str = "") -> T:
    """The condition's first true value. Looks every 20 ms until the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.02)


def _as_user(user: int) -> tuple[str, ...]:
    """Become that user, with none of root's rights but to read the interpreter wherever root has installed it."""
    read = "+dac_read_search"
    ids = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return (
        "setpriv",
        *ids,
        "--bounding-set=-all,+dac_read_search",
        f"--inh-caps=-all,{read}",
        f"--ambient-caps={read}",
    )


class Job:
    """One agent in a runtime directory and process group of its own; its output goes to a file.

    Without standbys unless a test is about them: they import torch for seconds beside it.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        environ: dict[str, str] | None = None,
        user: int | None = None,
        standby: bool = False,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        if user is not None:
            os.chown(self.runtime, user, user)
        shared_memory = folder / "shm"
        shared_memory.mkdir(exist_ok=True)
        shared_memory.chmod(0o1777)
        self.log = folder / f"agent-{self.mark[:6]}.log"
        quiet = {} if standby else {"PET_STANDBY": "0"}
        self.environ = {
            **os.environ,
            "RUNTIME_DIRECTORY": str(self.runtime),
            "ELASTICD_SHM_DIR": str(shared_memory),
            MARK: self.mark,
            **quiet,
            **(environ or {}),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*(_as_user(user) if user is not None else ()), sys.executable, "-m", "elastic", "run", *args],
                env=self.environ,
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def status(self) -> dict[str, Any] | None:
        """What the agent answers on its socket, None while it does not."""
        path = runtime.socket_path(self.runtime, self.process.pid)
        with contextlib.suppress(OSError, ValueError), runtime.connect(path, 5.0) as connection:
            connection.sendall(b"GET /status HTTP/1.0\r\n\r\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
            parsed: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
            return parsed
        return None

    def wait_status(self, condition: Callable[[dict[str, Any]], object], *, seconds: float = 60.0) -> dict[str, Any]:
        """The first status for which the condition holds."""

        def look() -> dict[str, Any] | None:
            if self.process.poll() is not None:
                raise AssertionError(f"the agent has ended with {self.process.returncode}:\n{self.output}")
            status = self.status()
            return status if status and condition(status) else None

        try:
            return wait_for(look, seconds=seconds)
        except WaitTimeoutError as exc:
            raise WaitTimeoutError(f"{exc}\nlast status: {self.status()}\n{self.output}") from exc

    def wait_step(self, step: int, *, seconds: float = 60.0) -> dict[str, Any]:
        """Until every worker has applied that step."""
        return self.wait_status(
            lambda s: s["workers"] and all((w["step"] or 0) >= step for w in s["workers"]), seconds=seconds
        )

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as exc:
            raise WaitTimeoutError(f"the agent did not end within {seconds} s:\n{self.output}") from exc

    def processes(self) -> set[int]:
        """Everything that came from this job, the agent included, zombies not."""
        return marked(self.mark)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        try:
            wait_for(lambda: not self.processes(), seconds=10.0, what="the job's processes are gone")
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> set[int]:
    needle = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes() and b"(zombie)" not in (entry / "status").read_bytes():
                    found.add(int(entry.name))
    return found


@contextlib.contextmanager
def running(folder: Path, *args: str, **options: Any) -> Iterator[Job]:
    """An agent that is certainly gone, with all it started, when the block ends."""
    job = Job(folder, *args, **options)
    try:
        yield job
    finally:
        job.close()


def run_to_end(folder: Path, *args: str, seconds: float = 60.0, **options: Any) -> tuple[int, str]:
    """Exit code and output of a job that ends by itself."""
    with running(folder, *args, **options) as job:
        code = job.wait(seconds)
        return code, job.output


def write(folder: Path, name: str, text: str) -> Path:
    """A script of the test's."""
    path = folder / name
    path.write_text(text)
    return path


def wardens(agent: int) -> list[int]:
    """Of the agent with that pid."""
    found = subprocess.run(["pgrep", "-P", str(agent), "-f", "warden.py"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]
