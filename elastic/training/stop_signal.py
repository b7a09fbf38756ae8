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
        self._is_hooked = False  # for good: what is registered at fork stays
        self._masks = threading.local()

    def take(self, *, under_agent: bool) -> None:
        """From now on, where the program has no handler of its own. Outside the main thread nothing can be taken."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._stop)
            if not self._is_hooked:  # a second time it would find the signal held already, and never let it go
                self._is_hooked = True
                os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._give_back)
        if under_agent and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _stop(self, _number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.came = True

    # A process that the program forks (a loader's) ends by SIGTERM as ever. Python forgets what comes in mid-fork: the
    # signal is held back until the child is itself.

    def _hold(self) -> None:
        self._masks.kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.kept)

    def _give_back(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._let_go()
