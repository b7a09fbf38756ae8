"""One `elasticd run` of the demo: started, looked at through its status socket, and certainly ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from elastic.metrics.client import find_agents
from elastic.status import JobStatus

_STOP_SECONDS = 10.0
_TAIL_LINES = 12
_NOT_INHERITED = ("PET_", "ELASTICD_", "TORCHELASTIC_", "NOTIFY_SOCKET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")


class Job:
    """An agent in a session of its own (a Ctrl-C at the terminal is for the demo alone), writing into `folder`."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self._runtime = folder / "run"
        self._runtime.mkdir(mode=0o700, parents=True)
        scratch = folder / "tmp"  # torch and multiprocessing leave things where TMPDIR says
        scratch.mkdir()
        self._log = folder / "agent.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        environ |= {"RUNTIME_DIRECTORY": str(self._runtime), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environ,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def status(self) -> JobStatus | None:
        """What the agent says; None while it does not answer."""
        agents = find_agents({"RUNTIME_DIRECTORY": str(self._runtime)})
        return next((agent.status for agent in agents if agent.pid == self._process.pid), None)

    def last_words(self) -> str:
        """The end of the agent's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def stop(self) -> None:
        """End whatever still runs; bounded. Nothing is saved."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # to an agent: stop now
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_STOP_SECONDS)
        if self._process.returncode >= 0:
            return  # an agent that ends by itself leaves nobody behind
        deadline = time.monotonic() + _STOP_SECONDS
        while (pids := self._pids()) and time.monotonic() < deadline:
            time.sleep(0.05)  # its warden is at work
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        """Processes of ours, known by the runtime directory in their environment."""
        mark = os.fsencode(f"RUNTIME_DIRECTORY={self._runtime}")
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found
