"""The watch over any stream: what ends it for a while, and what does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest

from elastic.rendezvous.etcd_watch import Batch, EtcdWatch
from elastic.rendezvous.store import Event
from tests.support.job import wait_for


class Short:
    """A connection on a host that has no room for a stream's threads at first."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.told: list[Event] = []
        self._end = threading.Event()

    def watch(self, _keys: Sequence[str], _prefix: bool, _start_revisions: Sequence[int]) -> Short:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("can't start new thread")
        return self

    def __iter__(self) -> Iterator[Batch]:
        yield Batch(created=True, revision=4)
        yield Batch(events=[Event(key="k", revision=5, entry=None)])
        self._end.wait(20)

    def cancel(self) -> None:
        self._end.set()


@pytest.mark.parametrize("where", ["of the stream", "of its timer"])
def test_a_host_without_room_for_a_thread_is_waited_out(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    connection = Short(3 if where == "of the stream" else 0)
    if where == "of its timer":
        start, refusals = threading.Timer.start, [None] * 3

        def short(timer: threading.Timer) -> None:
            if refusals:
                refusals.pop()
                raise RuntimeError("can't start new thread")
            start(timer)

        monkeypatch.setattr(threading.Timer, "start", short)
    watch = EtcdWatch(
        ["k"],
        prefix=False,
        after_revision=4,
        on_events=connection.told.extend,
        on_gap=lambda: None,
        borrow=lambda: contextlib.nullcontext(connection),
        timeout_seconds=5.0,
    )
    watch.start()
    try:
        wait_for(lambda: connection.told, seconds=20.0, what="the change is told")
        assert not watch.closed
    finally:
        watch.close()
