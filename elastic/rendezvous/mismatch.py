"""Whether this node's settings are those of the job that it is in."""

from __future__ import annotations

from elastic.errors import UsageError
from elastic.rendezvous.records import News


class Mismatch:
    """Another job under this id, or other flags: an error, once it is certain that no ghost says so."""

    def __init__(self, *, run_id: str, mine: str, patience_seconds: float) -> None:
        """`mine`: digest of what all nodes must agree on; empty news of it is no news."""
        self._run_id = run_id
        self._mine = mine
        self._patience_seconds = patience_seconds
        self._since: float | None = None

    def look(self, news: News | None, now: float) -> UsageError | None:
        """Called at each pass with what the leader says, None while this node has not joined."""
        if news is None or not news.settings or news.settings == self._mine:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since <= self._patience_seconds:
            return None
        return UsageError(
            f"job {self._run_id} runs with other settings (digest {news.settings}, here {self._mine}): "
            f"give the same flags as on node {news.node_id}, or another --rdzv-id"
        )
