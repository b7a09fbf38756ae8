"""This node's way into the next round: a store that may become the round's, the word to the others, and readiness."""

from __future__ import annotations

import logging
import time

from elastic.agent.crew import Crew
from elastic.errors import ElasticError
from elastic.rendezvous.membership import Membership

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.5  # for an expelled node's join to show in the view; for a host without room to have some


class Joining:
    """Under way from the join until the round that has this node is started; driven by the agent's loop."""

    def __init__(self, *, crew: Crew, membership: Membership, patience_seconds: float) -> None:
        """`patience_seconds`: how long a host may have no room for a store."""
        self._crew, self._membership, self._patience_seconds = crew, membership, patience_seconds
        self.is_under_way = False
        self._is_ready = False  # to be let into a running job
        self._again_at = 0.0
        self._no_room_since: float | None = None

    def may_begin(self, now: float) -> bool:
        """Whether the last attempt has had its time."""
        return now >= self._again_at

    def begin(self) -> None:
        """Join, once there is a store for the round to come: where this host has no room for one, training waits.

        Raises: ElasticError when it never has. UsageError: nobody can listen at the address that was given.
        """
        now = time.monotonic()
        self._again_at = now + _AGAIN_SECONDS
        try:
            store_port = self._crew.open_store()
        except OSError as exc:
            self._wait_for_room(now, exc)
            return
        self.is_under_way, self._no_room_since = True, None
        self._is_ready = self._crew.has_warm_standbys
        self._membership.join(after=self._crew.round, store_port=store_port, ready=self._is_ready)

    def _wait_for_room(self, now: float, why: OSError) -> None:
        if self._no_room_since is None:
            self._no_room_since = now
            logger.warning("the store for the next round cannot be opened: %s; trying again", why)
        if now - self._no_room_since > self._patience_seconds:
            raise ElasticError(
                f"the store for the next round could not be opened for {self._patience_seconds:g} s (--join-timeout): "
                f"{why}; see ulimit -n and -u, free memory, net.ipv4.ip_local_port_range"
            ) from why

    def ended(self) -> None:
        """The round is being started here."""
        self.is_under_way, self._again_at = False, 0.0

    def prepare(self) -> bool:
        """For the next round. A newcomer to a running job is ready, and let in, when its standbys are warm.

        Returns whether there are other standbys than before.
        """
        view = self._membership.view()
        is_newcomer = self.is_under_way and view.round is not None and view.node_rank is None
        has_changed = self._crew.prepare(is_newcomer=is_newcomer)
        if self.is_under_way and not self._is_ready and self._crew.has_warm_standbys:
            self._is_ready = True
            self._membership.ready()
        return has_changed
