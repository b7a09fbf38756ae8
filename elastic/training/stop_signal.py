"""SIGTERM to a worker in its training loop."""

from __future__ import annotations

import os
import signal
import threading


class StopSignal:
    """SIGTERM means save and leave; a second one kills.

    Alone there is nobody else to ask (SLURM, a container's stop). Under our agent, which takes signals itself,
    `systemctl kill` and SLURM send them to every process of the job, and the default would be death. The agent itself
    ends who is in the loop by SIGKILL.
    """

    def __init__(self) -> None:
        self.came = False

    def take(self, *, under_agent: bool) -> None:
        """From now on, where the program has no handler of its own. Outside the main thread nothing can be taken."""
        owner = os.getpid()

        def stop(number: int, frame: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if os.getpid() == owner:
                self.came = True
            else:  # a process that the program has forked meanwhile
                os.kill(os.getpid(), number)

        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, stop)
        if under_agent and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
