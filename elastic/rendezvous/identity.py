"""Who an agent is, so that a node's own ghost can be told from a live duplicate of its id.

A ghost is the key of an agent that is certainly dead: another boot of this very machine, or a process of this boot, in
the same pid namespace, that is gone. All else may be alive, and only its lease can say otherwise.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One start of one agent."""

    machine: str  # /etc/machine-id; "" where there is none
    boot: str
    namespace: int  # inode of the pid namespace
    pid: int
    started: int  # start time of the process, clock ticks since boot
    token: str  # tells two in one process apart


class Claim(enum.Enum):
    """What the key of our id means that somebody else has written."""

    GHOST = "its writer is dead"
    ALIVE = "its writer lives"
    UNSURE = "its writer is on another machine or in another container: only the lease can tell"


def own_identity() -> Identity:
    """The identity of this process, for one membership."""
    pid = os.getpid()
    return Identity(
        machine=_read("/etc/machine-id"),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=os.stat("/proc/self/ns/pid").st_ino,  # noqa: PTH116  Path.stat would resolve the link's text
        pid=pid,
        started=start_time(pid) or 0,
        token=secrets.token_hex(4),
    )


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process, or only its corpse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def judge(other: Identity, me: Identity, started: Callable[[int], int | None] = start_time) -> Claim:
    """What to make of a key of our id; `started` gives a process's start time."""
    if other.boot != me.boot:
        return Claim.GHOST if other.machine and other.machine == me.machine else Claim.UNSURE
    if other.namespace != me.namespace:
        return Claim.UNSURE
    return Claim.ALIVE if started(other.pid) == other.started else Claim.GHOST


def own_address(host: str) -> str:
    """`host` again, which the user gives for this one. Raises: UsageError where nobody could listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as exc:
        raise UsageError(
            f"--local-addr {host} is no address of this host ({exc.strerror or exc}): give a name or address of an "
            "interface that the other nodes reach, or leave it out"
        ) from exc
    return host


def address_towards(endpoints: Sequence[tuple[str, int]]) -> str:
    """This host's address on the way to the store, so that peers find the interface that the store is reached by."""
    for host, port in endpoints:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: the kernel only chooses the route
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
