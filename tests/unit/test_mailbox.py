"""What the agent's loop is woken by: no signal and no question is lost, and neither ends it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from elastic.agent.mailbox import Mailbox, Request, SignalReceived


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox()
    box.take_signals([signal.SIGHUP, signal.SIGTERM])
    yield box
    box.close()


def test_a_storm_of_one_signal_does_not_drown_another_one(mailbox: Mailbox) -> None:
    for _ in range(3000):  # more than the descriptor that wakes the loop can hold
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)
    events = mailbox.wait(time.monotonic() + 5)
    assert events == [SignalReceived(signal.SIGHUP)] * 2 + [SignalReceived(signal.SIGTERM)]
    assert mailbox.wait(time.monotonic()) == []


def test_a_second_signal_of_a_kind_is_told_as_well(mailbox: Mailbox) -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert mailbox.wait(time.monotonic() + 5) == [SignalReceived(signal.SIGTERM)] * 2


def test_what_goes_wrong_with_an_answer_is_the_askers(mailbox: Mailbox) -> None:
    asked, unanswered = Request(lambda: [][0]), Request(lambda: None)
    mailbox.post(asked)
    (request,) = mailbox.wait(time.monotonic() + 5)
    request.serve()
    with pytest.raises(IndexError):
        asked.result(1.0)
    with pytest.raises(TimeoutError, match="did not answer within"):
        unanswered.result(0.01)
