"""What a member's word that a round is over makes of it: pure, like `round.py`."""

from __future__ import annotations

import dataclasses

from elastic.rendezvous.membership import Breakage
from elastic.rendezvous.round import Phase, Round


def broken_by(current: Round, breakage: Breakage) -> Round:
    """The round after one of its members told why it is over; itself when that adds nothing.

    The cause that stands is the first one that is no mere consequence of another, and whether the failure is charged
    goes with it. What is fatal closes the job.
    """
    if current.phase is Phase.CLOSED:
        return current
    told = dataclasses.replace(current, progressed=current.progressed or breakage.progressed)
    if current.phase is not Phase.BROKEN or (current.consequence and not breakage.consequence):
        told = dataclasses.replace(
            told,
            phase=Phase.BROKEN,
            cause=breakage.cause,
            charged=breakage.charged,
            consequence=breakage.consequence,
            failed_before=round(breakage.seconds, 3),
        )
    elif breakage.charged and not breakage.consequence:
        told = dataclasses.replace(told, charged=True)
    if not breakage.fatal:
        return told
    return dataclasses.replace(
        told, phase=Phase.CLOSED, cause=breakage.cause, outcome="failed", exit_code=breakage.exit_code
    )
