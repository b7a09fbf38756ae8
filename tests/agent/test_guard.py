"""What the agent believes of its warden's deadline, wherever it stood still."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from elastic.agent import guard as guards
from elastic.agent.guard import Guard
from elastic.agent.mailbox import Mailbox
from elastic.agent.warden import Warden


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(guards, "boottime", made)
    return made


@pytest.fixture
def guard() -> Iterator[Guard]:
    mailbox = Mailbox()
    yield Guard(mailbox, "0" * 32, ())  # its warden is not started: nobody's processes are at stake
    mailbox.close()


def test_a_deadline_moves_on_as_long_as_it_is_told_in_time(guard: Guard, clock: Clock) -> None:
    assert guard.allow_for(1.0)
    for _ in range(5):
        clock.now += 0.9
        assert not guard.is_overdue
        assert guard.allow_for(1.0)
    clock.now += 1.0
    assert guard.is_overdue
    assert guard.silent_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("stood_still", ["before the warden is told", "when it has been told"])
def test_a_stop_in_the_middle_of_telling_is_not_forgotten(
    guard: Guard, clock: Clock, monkeypatch: pytest.MonkeyPatch, stood_still: str
) -> None:
    assert guard.allow_for(1.0)
    clock.now += 0.5
    if stood_still == "before the warden is told":
        clock.now += 5.0  # the caller has looked at the clock before
    else:

        def tell(_how: Callable[[Warden], None]) -> None:
            clock.now += 5.0

        monkeypatch.setattr(guard, "_say", tell)
    assert not guard.allow_for(1.0), "the warden has acted on the old deadline, or may have"
    assert guard.is_overdue
    assert guard.silent_seconds > 5.0
