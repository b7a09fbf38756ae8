"""The rival: torch's dynamic rendezvous over c10d, in the same processes. Each node has its handler, its own client of
the store and a thread that waits in `next_rendezvous`, as in an agent of torchrun's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from tests.bench.rendezvous.fleet import Share
from tests.bench.rendezvous.sightings import Sightings

_LAST_CALL_SECONDS = 1.0  # torch waits for it after a loss, for there are fewer than MAX nodes then
_STORE_TIMEOUT = timedelta(seconds=300)


class Handlers:
    """See `fleet.Party`."""

    def __init__(self, share: Share) -> None:
        logging.getLogger("torch").setLevel(logging.ERROR)
        self._share = share
        self._sightings = Sightings()
        self._server = self._connect(is_master=True) if share.is_host else None
        self._handlers = [self._handler() for _ in share.numbers]
        self._alive = list(self._handlers)

    def _connect(self, *, is_master: bool = False) -> TCPStore:
        return TCPStore("127.0.0.1", self._share.port, None, is_master, _STORE_TIMEOUT, wait_for_workers=False)

    def _handler(self) -> torch_rendezvous.DynamicRendezvousHandler:
        store = self._connect()
        return torch_rendezvous.DynamicRendezvousHandler.from_backend(
            run_id=self._share.run_id,
            store=store,
            backend=C10dRendezvousBackend(store, self._share.run_id),
            min_nodes=self._share.total - 1,
            max_nodes=self._share.total,
            local_addr="127.0.0.1",
            timeout=torch_rendezvous.RendezvousTimeout(last_call=timedelta(seconds=_LAST_CALL_SECONDS)),
            keep_alive_interval=60,  # nobody is to be taken for dead who only waits for its turn on a core
        )

    def join(self) -> None:
        for handler in self._alive:
            threading.Thread(target=self._next, args=(handler,), daemon=True).start()

    def _next(self, handler: torch_rendezvous.DynamicRendezvousHandler) -> None:
        self._sightings.note(handler.next_rendezvous().world_size)

    def lose(self) -> float:
        """The node leaves the round's participants, which is what the others do with one whose heart has stopped."""
        victim = self._alive.pop()
        began = time.monotonic()
        deadline = began + _STORE_TIMEOUT.total_seconds()
        victim._stop_heartbeats()
        victim._op_executor.run(torch_rendezvous._RendezvousExitOp(), deadline)
        return began

    def resume(self) -> None:
        self.join()

    def formed(self, members: int, seconds: float) -> float | None:
        return self._sightings.wait(members, len(self._alive), seconds)

    def counts(self) -> Mapping[str, int]:
        return {}
