"""A thin adapter from our membership to torch's RendezvousHandler, for code written against torch's agent contract.

The agent itself works on `Membership`; torch's WorkerSpec wants a handler, and tools ask it for the backend and run id.
Plain torchrun finds its own handler through the entry point below, which torch loads in every process: so it imports
nothing before a handler is made.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
)

from elastic.rendezvous.membership import Membership
from elastic.rendezvous.round import Phase


class MembershipHandler(RendezvousHandler):
    """Answers torch's questions about the job from the membership's memory; never blocks, never raises in a poll."""

    def __init__(self, membership: Membership, *, run_id: str, backend: str) -> None:
        self._membership = membership
        self._run_id = run_id
        self._backend = backend

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises: RendezvousClosedError always: rounds of this handler are formed by the agent's own loop."""
        raise RendezvousClosedError("rounds are formed by elasticd's agent; use its membership instead")

    def is_closed(self) -> bool:
        current = self._membership.view().round
        return current is not None and current.phase is Phase.CLOSED

    def set_closed(self) -> None:
        self._membership.leave(outcome="failed")

    def num_nodes_waiting(self) -> int:
        return len(self._membership.view().waiting)

    def shutdown(self) -> bool:
        self._membership.close()
        return True


def torchrun_handler() -> RendezvousHandlerCreator:
    """The entry point `etcd3` of the group `torchrun.handlers`; torch calls it without arguments."""

    def create(params: RendezvousParameters) -> RendezvousHandler:
        from elastic.rendezvous.torchrun import create_handler

        return create_handler(params)

    return create
