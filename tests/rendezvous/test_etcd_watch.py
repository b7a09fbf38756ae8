"""The watches over any stream: what ends it for a while, and what that means for each of them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from elastic.errors import StoreUnavailableError
from elastic.rendezvous.etcd_watch import Batch, EtcdWatch, Watches
from elastic.rendezvous.store import Event
from tests.support.job import wait_for


class Stream:
    """What a server says is put into it; it keeps what it was asked for."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bool, int]] = []
        self.released: list[int] = []
        self._said: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._said.get(timeout=20.0)) is not None:
            yield batch
        raise StoreUnavailableError("cancelled")

    def say(self, *batches: Batch) -> None:
        for batch in batches:
            self._said.put(batch)

    def request(self, key: str, prefix: bool, start_revision: int) -> None:
        self.requests.append((key, prefix, start_revision))

    def release(self, watch_id: int) -> None:
        self.released.append(watch_id)

    def cancel(self) -> None:
        self._said.put(None)


class Connection:
    """It keeps its streams, and what each loan ended with. It may have no room for a stream's threads at first."""

    def __init__(self, refusals: int = 0, error: type[Exception] = RuntimeError) -> None:
        self.refusals = refusals
        self.error = error
        self.streams: list[Stream] = []
        self.retired: list[BaseException] = []

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Connection]:
        try:
            yield self
        except StoreUnavailableError as exc:
            self.retired.append(exc)
            raise

    def watch(self) -> Stream:
        if self.refusals:
            self.refusals -= 1
            raise self.error("can't start new thread")
        self.streams.append(Stream())
        return self.streams[-1]

    def asked(self, number: int, *, times: int = 1) -> Stream:
        """The stream of that number, once it has been asked for so much."""
        wait_for(
            lambda: len(self.streams) >= number and len(self.streams[number - 1].requests) >= times,
            what=f"stream {number} is asked for {times}",
        )
        return self.streams[number - 1]


class Heard:
    """What one watch is told."""

    def __init__(self) -> None:
        self.revisions: list[int] = []
        self.gaps = 0

    def events(self, events: list[Event]) -> None:
        self.revisions += [event.revision for event in events]

    def gap(self) -> None:
        self.gaps += 1


def watch(watches: Watches, heard: Heard, *keys: str, after: int) -> EtcdWatch:
    return watches.add(keys, prefix=False, after_revision=after, on_events=heard.events, on_gap=heard.gap)


def change(watch_id: int, *revisions: int) -> Batch:
    return Batch(watch_id=watch_id, events=[Event(key="", revision=revision, entry=None) for revision in revisions])


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def watches(connection: Connection) -> Iterator[Watches]:
    with contextlib.closing(Watches(connection.borrow, timeout_seconds=5.0)) as made:
        yield made
    assert not [thread for thread in threading.enumerate() if thread.name == "elasticd-watch"]


def test_one_that_comes_later_is_on_the_same_stream_and_one_that_goes_ends_no_other(
    connection: Connection, watches: Watches
) -> None:
    first, later = Heard(), Heard()
    going = watch(watches, first, "a", "b", after=4)
    stream = connection.asked(1)
    stream.say(Batch(watch_id=0, created=True, revision=4), Batch(watch_id=1, created=True, revision=4), change(1, 5))
    watch(watches, later, "c", after=7)
    stream.say(Batch(watch_id=2, created=True, revision=8), change(0, 6), change(2, 7, 8, 9))
    wait_for(lambda: later.revisions)
    assert (first.revisions, later.revisions) == ([5, 6], [8, 9])  # what it knew already is not told again
    going.close()
    assert stream.released == [0, 1]
    stream.say(change(0, 10), Batch(watch_id=0, cancelled="on request"), change(2, 11))
    wait_for(lambda: later.revisions[-1] == 11)
    assert (first.revisions, first.gaps, later.gaps, len(connection.streams)) == ([5, 6], 0, 0, 1)
    assert stream.requests == [("a", False, 5), ("b", False, 5), ("c", False, 8)]


def test_one_that_goes_before_it_was_confirmed_is_released_when_it_is(connection: Connection, watches: Watches) -> None:
    heard, other = Heard(), Heard()
    watch(watches, heard, "a", after=4)
    stream = connection.asked(1)
    watch(watches, other, "b", after=4).close()
    stream.say(Batch(watch_id=0, created=True, revision=4), Batch(watch_id=1, created=True, revision=4), change(1, 5))
    stream.say(change(0, 6))
    wait_for(lambda: heard.revisions)
    assert (heard.revisions, other.revisions, stream.released) == ([6], [], [1])


def test_without_watches_there_is_no_thread_and_the_connection_stays(connection: Connection, watches: Watches) -> None:
    heard = Heard()
    for count in (1, 2, 3):
        going = watch(watches, heard, "a", after=count)
        assert connection.asked(count).requests == [("a", False, count + 1)]
        going.close()
        going.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "elasticd-watch"])
    assert connection.retired == []


def test_a_stream_that_ends_takes_all_of_them_to_the_next_one(connection: Connection, watches: Watches) -> None:
    first, second = Heard(), Heard()
    watch(watches, first, "a", after=4)
    watch(watches, second, "b", after=4)
    stream = connection.asked(1)
    wait_for(lambda: len(stream.requests) == 2)
    stream.say(Batch(watch_id=0, created=True, revision=4), Batch(watch_id=1, created=True, revision=4))
    stream.say(change(0, 6, 7), Batch(watch_id=1, revision=7))
    wait_for(lambda: first.revisions)
    stream.say(Batch(watch_id=1, cancelled="no leader"))
    assert connection.asked(2, times=2).requests == [("a", False, 8), ("b", False, 8)]
    assert (first.gaps, second.gaps, [str(exc) for exc in connection.retired]) == (
        *(0, 0),
        ["the watch of b was cancelled: no leader"],
    )


def test_compacted_history_is_a_gap_for_those_alone_that_have_not_seen_it(
    connection: Connection, watches: Watches
) -> None:
    behind, ahead = Heard(), Heard()
    watch(watches, behind, "a", after=4)
    watch(watches, ahead, "b", after=20)
    connection.asked(1).say(Batch(watch_id=0, created=True, revision=30), Batch(watch_id=0, compacted=10))
    assert connection.asked(2, times=2).requests == [("a", False, 11), ("b", False, 21)]
    assert (behind.gaps, ahead.gaps, connection.retired) == (1, 0, [])


def test_a_store_that_has_gone_back_is_a_gap_for_all_that_were_further(
    connection: Connection, watches: Watches
) -> None:
    behind, ahead = Heard(), Heard()
    watch(watches, behind, "a", after=4)
    watch(watches, ahead, "b", after=20)
    stream = connection.asked(1)
    stream.say(Batch(watch_id=0, created=True, revision=10), Batch(watch_id=1, created=True, revision=10))
    assert connection.asked(2, times=2).requests == [("a", False, 5), ("b", False, 11)]
    assert (behind.gaps, ahead.gaps) == (0, 1)


def test_a_server_that_confirms_nothing_is_left(connection: Connection) -> None:
    heard = Heard()
    with contextlib.closing(Watches(connection.borrow, timeout_seconds=0.5)) as watches:
        watch(watches, heard, "a", after=4)
        stream = connection.asked(1)
        stream.say(Batch(watch_id=0, created=True, revision=4))
        wait_for(lambda: watches._is_confirmed)
        watch(watches, heard, "b", after=6)  # at this one it freezes
        assert connection.asked(2, times=2).requests == [("a", False, 5), ("b", False, 7)]
        assert len(connection.retired) == 1


def test_closing_waits_for_a_callback_and_may_be_called_from_one(connection: Connection, watches: Watches) -> None:
    within, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    closed: list[EtcdWatch] = []

    def told(_: list[Event]) -> None:
        within.set()
        go_on.wait(20.0)
        closed[0].close()
        ended.set()

    closed.append(watches.add(["a"], prefix=False, after_revision=4, on_events=told, on_gap=lambda: None))
    connection.asked(1).say(Batch(watch_id=0, created=True, revision=4), change(0, 5), change(0, 6))
    assert within.wait(20.0)
    closing = threading.Thread(target=closed[0].close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    closing.join(20.0)
    assert ended.is_set()


def test_no_error_ends_the_thread_that_all_depend_on(caplog: pytest.LogCaptureFixture) -> None:
    connection, heard = Connection(2, ValueError), Heard()
    with contextlib.closing(Watches(connection.borrow, timeout_seconds=5.0)) as watches:
        watch(watches, heard, "k", after=4)
        connection.asked(1).say(Batch(watch_id=0, created=True, revision=4), change(0, 5))
        wait_for(lambda: heard.revisions, seconds=20.0, what="the change is told")
    assert caplog.text.count("watch of k: a mistake of ours") == 2


@pytest.mark.parametrize("where", ["of the stream", "of its timer"])
def test_a_host_without_room_for_a_thread_is_waited_out(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    connection, heard = Connection(3 if where == "of the stream" else 0), Heard()
    refusals = short_of_threads(monkeypatch, threading.Timer) if where == "of its timer" else []
    with contextlib.closing(Watches(connection.borrow, timeout_seconds=5.0)) as watches:
        going = watch(watches, heard, "k", after=4)
        wait_for(lambda: not refusals)
        last = 4 if where == "of its timer" else 1
        connection.asked(last).say(Batch(watch_id=0, created=True, revision=4), change(0, 5))
        wait_for(lambda: heard.revisions, seconds=20.0, what="the change is told")
        assert not going.closed


def short_of_threads(monkeypatch: pytest.MonkeyPatch, kind: type[threading.Thread]) -> list[None]:
    start: Callable[[threading.Thread], None] = kind.start
    refusals = [None] * 3

    def short(thread: threading.Thread) -> None:
        if refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(kind, "start", short)
    return refusals
