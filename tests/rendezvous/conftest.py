from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rendezvous.peers import ENDINGS


@pytest.fixture(scope="module", autouse=True)
def _endings() -> Iterator[None]:
    """The threads of nodes that vanished end with the module's tests."""
    yield
    for ending in ENDINGS:
        ending.join()
    ENDINGS.clear()
