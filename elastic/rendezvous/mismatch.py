"""Whether this node's settings are those of the job that it is in."""

from __future__ import annotations

from elastic.errors import UsageError
from elastic.rendezvous.records import News


def differences(mine: str, theirs: str) -> str:
    """What differs between two lines of flags: "--max-restarts=5 instead of 3"."""
    ours, others = _parsed(mine), _parsed(theirs)
    named = []
    for flag in dict.fromkeys((*ours, *others)):
        here, there = ours.get(flag), others.get(flag)
        if here != there:
            is_here = f"no {flag}" if here is None else f"{flag}={here}" if here else flag
            named.append(is_here if "" in (here, there) else f"{is_here} instead of {there or 'none'}")
    return ", ".join(named)


def other_program(mine: str, theirs: str) -> str:
    """How another node's program differs, for a sentence; empty where it does not, or is not known."""
    here, there = mine.rpartition(" ")[0], theirs.rpartition(" ")[0]
    if mine == theirs or not here or not there:
        return ""
    return f"{there} with other arguments" if here == there else f"{there}, not {here}"


def _parsed(settings: str) -> dict[str, str]:
    """Value of each flag, empty for one that has none."""
    return {flag: value for flag, _, value in (part.partition("=") for part in settings.split())}


class Mismatch:
    """Another job under this id, or other flags: an error, once it is certain that no ghost says so."""

    def __init__(self, *, run_id: str, mine: str, patience_seconds: float) -> None:
        """`mine`: the flags that all nodes must agree on; empty news of them is no news."""
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
            f"job {self._run_id} runs with other settings; here is {differences(self._mine, news.settings)}: "
            f"give the same flags as on node {news.node_id}, or another --rdzv-id"
        )
