"""Profiles on request: what a command on the agent's socket asks for becomes an order to every local worker."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from pathlib import Path

from elastic.agent.crew import Crew
from elastic.agent.mailbox import Mailbox, Request
from elastic.metrics.site import Answer, Ask, json_line
from elastic.profile_order import MOST_STEPS, ProfileOrder

_ANSWER_SECONDS = 4.0
_FORGOTTEN_STEPS = 100  # so many steps later nobody is going to begin with it any more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The newest order, and when it was given."""

    order: ProfileOrder
    round: int
    step: int
    ranks: tuple[int, ...]

    @property
    def is_written(self) -> bool:
        return all(self.order.summary(rank).exists() for rank in self.ranks)


class Profiles:
    """`answer` is for any thread; the rest is done by the agent's loop, which owns the workers."""

    def __init__(self, *, crew: Crew, mailbox: Mailbox, log_dir: str | None) -> None:
        self._crew, self._mailbox, self._log_dir = crew, mailbox, log_dir
        self._last: _Asked | None = None
        self._names: set[str] = set()

    def answer(self, ask: Ask) -> Answer:
        """POST /profile?steps=N&out=DIR: what was ordered, as JSON, or in one line why nothing was."""
        text, folder = ask.value("steps"), ask.value("out") or self._log_dir or ""
        if not text.isdigit() or not 1 <= int(text) <= MOST_STEPS:
            return _refusal(400, f"--steps={text[:20]}: 1 to {MOST_STEPS} steps can be profiled")
        request = Request(partial(self._order, int(text), folder))
        self._mailbox.post(request)
        answer: Answer = request.result(_ANSWER_SECONDS)
        return answer

    def _order(self, steps: int, place: str) -> Answer:
        workers, round_number = self._crew.workers.alive, self._crew.round
        if not workers:
            return _refusal(409, "no worker runs on this node now: ask again when the job trains")
        if any(not worker.progress.pid for worker in workers):
            return _refusal(
                409,
                "not every worker has a session (elastic.session(), or the Trainer), or is that far yet: a script "
                "without one can only profile itself, with torch.profiler",
            )
        if not all(worker.progress.in_loop for worker in workers):
            return _refusal(409, "not every worker is in its training loop yet: ask again once the job trains")
        if self._is_under_way():
            return _refusal(409, "a profile is under way: ask again once it is written")
        if not place:
            return _refusal(400, "the job has no --log-dir to write a profile to: name a directory with --out")
        folder = Path(place)
        ranks = tuple(worker.plan.rank for worker in workers)
        order = ProfileOrder(name=self._new_name(round_number), folder=str(folder), steps=steps, asked=len(ranks))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for worker in workers:
                worker.request_profile(order)
        except (OSError, ValueError) as exc:  # a path with a NUL
            why = getattr(exc, "strerror", None) or exc
            return _refusal(400, f"cannot write a profile to {folder}: {why}; name another with --out")
        self._last = _Asked(order=order, round=round_number, step=self._crew.applied_step, ranks=ranks)
        return Answer(
            200, json_line({"order": order.to_json(), "round": round_number, "ranks": ranks}), "application/json"
        )

    def _new_name(self, round_number: int) -> str:
        """No two have the same, even if asked for in the same second: their files would be taken for each other's."""
        name = base = f"profile-{time.strftime('%Y%m%d-%H%M%S')}-round{round_number}"
        while name in self._names:
            name = f"{base}-{len(self._names)}"
        self._names.add(name)
        return name

    def _is_under_way(self) -> bool:
        last = self._last
        if last is None or last.round != self._crew.round or last.is_written:
            return False
        return self._crew.applied_step < last.step + last.order.steps + _FORGOTTEN_STEPS


def _refusal(code: int, why: str) -> Answer:
    return Answer(code, f"{why}\n".encode())
