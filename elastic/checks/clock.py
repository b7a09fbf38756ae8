"""Whether this host's clock is kept in time. Leases do not need it; certificates, logs and dashboards do."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

from elastic.checks.finding import Finding, ok, warning

_STA_UNSYNC = 0x40
_TIME_ERROR = 5
_MOST_DIFFERENCE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelClock:
    """What adjtimex tells, whoever keeps the time: chrony, ntpd, systemd-timesyncd, a hypervisor's PTP."""

    result: int
    status: int
    most_error_microseconds: int


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def kernel_clock() -> KernelClock:
    """Reads only. Raises: OSError where this process may not."""
    timex = _Timex()
    result = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "adjtimex is refused")
    return KernelClock(result=result, status=timex.status, most_error_microseconds=timex.maxerror)


def check_sync(clock: KernelClock) -> Iterator[Finding]:
    """Unsynchronised is a warning: nothing here takes a decision by wall clocks."""
    if clock.result == _TIME_ERROR or clock.status & _STA_UNSYNC:
        remedy = "timedatectl set-ntp true, or start chrony; in a container it is the host's business"
        yield warning("time sync", "the kernel's clock is not synchronised", remedy)
    else:
        yield ok("time sync", f"synchronised, within {clock.most_error_microseconds / 1e6:.3f} s")


def check_difference(of: str, seconds: float, grain_seconds: float) -> Iterator[Finding]:
    """Against another host's clock, which is known to its grain."""
    message = f"this clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} that of {of}"
    if abs(seconds) > _MOST_DIFFERENCE_SECONDS + grain_seconds:
        yield warning("clock", message, "set the clock and keep it synchronised on both")
    else:
        yield ok("clock", f"agrees with that of {of} (to {grain_seconds:g} s, which is how it is told)")
