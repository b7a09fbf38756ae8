"""torch's view of this node's workers, for who reads it through `ElasticAgent.get_worker_group`."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState

from elastic.agent.crew import Crew
from elastic.rendezvous.membership import View
from elastic.rendezvous.round import Round


def fill_group(group: WorkerGroup, formed: Round, view: View, crew: Crew) -> None:
    """The crew's workers of the round, as a rendezvous of torch's would have left them."""
    slots: Any = group  # torch leaves the attributes that a rendezvous fills in without types
    slots.group_rank = view.node_rank
    slots.group_world_size = len(formed.members)
    slots.master_addr, slots.master_port = crew.master
    slots.state = WorkerState.HEALTHY
    for slot, worker in zip(slots.workers, crew.workers.all, strict=False):
        slot.id = worker.pid
        slot.global_rank = slot.role_rank = worker.plan.rank
        slot.world_size = slot.role_world_size = formed.world_size
