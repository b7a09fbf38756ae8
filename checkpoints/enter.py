"""How the ranks of a manager begin: they agree on the round, and that it is not a stale one."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from typing import Any

from .claim import Claim, another_owner
from .errors import CheckpointError, StaleRoundError
from .exchange import Exchange, depart
from .line import Line
from .rounds import highest_round, manifests_in, newest_name, read_record
from .storage import Storage

logger = logging.getLogger(__name__)
_SCOPE = "start"


def enter(
    storage: Storage, exchange: Exchange, line: Line, deadline: float, *, claim: Claim, has_memory: bool = False
) -> tuple[Line, str | None]:
    """Complete the line with the round (when it is 0: the next free one) and a nonce of this manager. Collective.

    Returns the line and the name of a checkpoint that some rank sees already, None where all begin with nothing.
    `has_memory`: this rank may have its state from there, and need not read the directory, if the round is known.

    Raises:
        StaleRoundError: some rank's directory holds a later round, or this one of another incarnation. On every rank.
        CheckpointError: some rank cannot read its directory.
    """
    keys = [f"{_SCOPE}/rank/{rank}" for rank in range(line.world_size)]
    look = _look(storage, line)
    look["highest"] = max(look["highest"], claim.newest_round)  # the directory may be away
    if look["error"] is not None and has_memory and line.round:
        logger.error("%s; what memory holds may do, and saves will fail until this is mended", look["error"])
        look["error"] = None
    exchange.put(keys[line.rank], look, deadline)
    if line.rank == 0:
        exchange.put(f"{_SCOPE}/verdict", _decide(exchange.get(keys, deadline), line), deadline)
    (verdict,) = exchange.get([f"{_SCOPE}/verdict"], deadline)
    keys.append(f"{_SCOPE}/verdict")
    depart(exchange, _SCOPE, keys, rank=line.rank, world_size=line.world_size, deadline=deadline)
    if verdict["error"] is not None:
        raise (StaleRoundError if verdict["stale"] else CheckpointError)(verdict["error"])
    return dataclasses.replace(line, round=verdict["round"], nonce=verdict["nonce"]), verdict["past"]


def _look(storage: Storage, line: Line) -> dict[str, Any]:
    """What this rank's directory says of rounds."""
    nothing = {"error": None, "stale": None, "highest": 0, "past": None}
    try:
        highest = highest_round(storage, line.directory)
        stale = None if line.round == 0 else _stale(storage, line)
        past = newest_name(storage, line.directory)
    except OSError as exc:
        return {**nothing, "error": f"rank {line.rank} cannot read the checkpoint directory: {exc}"}
    return {**nothing, "stale": stale, "highest": highest, "past": past}


def _stale(storage: Storage, line: Line) -> str | None:
    record = read_record(storage, line.directory)
    later = max((round_ for round_, _ in record.rounds), default=0) if record is not None else 0
    if later > line.round:
        return (
            f"round {line.round} cannot write to {line.directory}: round {later} has started there. Use a round above "
            f"{later} (round=None takes the next free one) or another directory"
        )
    for manifest in manifests_in(storage, line.directory):
        foreign = manifest.incarnation != line.incarnation
        if manifest.round > line.round or (foreign and manifest.round == line.round):
            return (
                f"round {line.round} of incarnation {line.incarnation!r} cannot write to {line.directory}: step "
                f"{manifest.step} there is of round {manifest.round} of incarnation {manifest.incarnation!r}. Use a "
                f"round above {manifest.round} (round=None takes the next free one) or another directory"
            )
    return (another_owner(line, record) or None) if line.incarnation else None


def _decide(looks: list[dict[str, Any]], line: Line) -> dict[str, Any]:
    error = next((look["error"] for look in looks if look["error"] is not None), None)
    stale = next((look["stale"] for look in looks if look["stale"] is not None), None)
    round_ = line.round or 1 + max(look["highest"] for look in looks)
    past = next((look["past"] for look in looks if look["past"] is not None), None)
    return {
        "round": round_,
        "nonce": secrets.token_hex(4),
        "error": error or stale,
        "stale": error is None,
        "past": past,
    }
