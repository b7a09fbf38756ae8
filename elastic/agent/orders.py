"""What the operator wants of this agent: said by signals, and by `elasticd drain` on its socket."""

from __future__ import annotations

import logging
import signal
import time

from elastic.agent.crew import Crew
from elastic.agent.decide import Asked
from elastic.agent.mailbox import Mailbox, Request
from elastic.config import JobConfig
from elastic.metrics.site import Answer, Ask, json_line
from elastic.rendezvous.membership import Membership

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 4.0
_STACKS_SECONDS = 0.2


class Orders:
    """`answer` is for any thread; the rest is done by the agent's loop."""

    def __init__(self, *, config: JobConfig, crew: Crew, membership: Membership, mailbox: Mailbox) -> None:
        self._config, self._crew, self._membership, self._mailbox = config, crew, membership, mailbox
        self._first: signal.Signals | None = None  # of TERM and INT: the next one means something else
        self.asked = Asked.NOTHING
        self.asked_at = 0.0  # CLOCK_MONOTONIC, to drain

    @property
    def is_leaving(self) -> bool:
        return self.asked is not Asked.NOTHING

    def take(self, number: signal.Signals) -> None:
        """A signal has come."""
        if number in (signal.SIGTERM, signal.SIGINT) and self._first is not None:
            logger.warning("a second %s: stopping at once, without saving", number.name)
            self.asked = Asked.STOP
            return
        logger.info("received %s", number.name)
        if number in (signal.SIGTERM, signal.SIGINT):
            self._first = number
            self._drain()
        elif number == signal.SIGQUIT:
            self._crew.workers.dump_stacks()
            time.sleep(_STACKS_SECONDS)  # the workers write their stacks themselves
            self.asked = Asked.STOP
        elif number == signal.SIGHUP:
            self._crew.reopen_logs()
        elif number == signal.SIGUSR1 and self._config.usr1 == "drain":
            self._drain()
        elif number == signal.SIGUSR1:
            for worker in self._crew.workers.alive:
                worker.request_save()

    def answer(self, _: Ask) -> Answer:
        """POST /drain: as SIGTERM, but never the second one. Whether it was asked before, and how long it may take."""
        request = Request(self._take_request)
        self._mailbox.post(request)
        try:
            answer: Answer = request.result(_ANSWER_SECONDS)
        except TimeoutError:
            return Answer(503, b"the agent is ending, or too busy to answer, and does it as soon as it can\n")
        return answer

    def _take_request(self) -> Answer:
        already = self.is_leaving
        if not already:
            logger.info("asked to drain")
            self._drain()
            self._mailbox.wake()  # this pass has decided already
        return Answer(200, json_line({"already": already, "seconds": self._seconds_left()}), "application/json")

    def _drain(self) -> None:
        self.asked_at = self.asked_at or time.monotonic()
        self.asked = max(self.asked, Asked.DRAIN)
        self._membership.leaving()

    def _seconds_left(self) -> float:
        """How long the workers may still take at most."""
        done = self._crew.done
        deadline = done.drain_until or done.terminate_until
        if deadline is not None:
            return max(0.0, deadline - time.monotonic())
        workers = self._crew.workers.alive
        if workers and not any(worker.progress.pid for worker in workers):  # scripts without a session
            return self._config.shutdown_timeout_seconds
        return self._config.stop_grace_seconds
