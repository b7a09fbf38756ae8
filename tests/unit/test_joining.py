"""A join needs a store that may become the round's: what happens where the host has no room for one."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

import pytest

from elastic.agent.joining import Joining
from elastic.errors import ElasticError


@dataclasses.dataclass
class Host:
    """What a join asks of the crew and the membership."""

    failures: int  # of the next attempts to open a store
    round: int = 3
    has_warm_standbys: bool = False
    joined: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def open_store(self) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return 4711

    def join(self, **facts: Any) -> None:
        self.joined.append(facts)


def joining(host: Host, patience_seconds: float = 60.0) -> Joining:
    return Joining(crew=host, membership=host, patience_seconds=patience_seconds)  # type: ignore[arg-type]  # as asked


def test_a_join_waits_until_there_is_room_for_a_store(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(failures=2)
    made = joining(host)
    for _ in range(2):
        made.begin()
        assert (made.is_under_way, host.joined) == (False, [])
        assert not made.may_begin(0.0)
    made.begin()
    assert (made.is_under_way, host.joined) == (True, [{"after": 3, "store_port": 4711, "ready": False}])
    assert caplog.text.count("Resource temporarily unavailable; trying again") == 1
    made.ended()
    assert (made.is_under_way, made.may_begin(0.0)) == (False, True)


def test_a_host_that_never_has_room_is_given_up_with_a_remedy() -> None:
    made = joining(Host(failures=9), patience_seconds=-1.0)
    with pytest.raises(ElasticError, match=r"could not be opened for -1 s \(--join-timeout\): .*see ulimit -n and -u"):
        made.begin()
