"""Single values as people write them: seconds, ranges, addresses, intervals. Pure; used as argparse types.

Each raises argparse.ArgumentTypeError with what is wrong and how it is written rightly.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from typing import Any

ETCD_PORT = 2379

_LONGEST_SECONDS = 365 * 86400  # what is longer no clock of the system's may be able to wait for
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WITH_UNIT = re.compile(rf"(\d+(?:\.\d+)?|\.\d+) ?({'|'.join(_UNITS)})", re.ASCII)


def seconds(text: str) -> float:
    """A time: seconds, or with a unit (`500ms`, `90s`, `10m`, `2h`, `1d`); below zero and endless are refused."""
    timed = _WITH_UNIT.fullmatch(text.strip())
    try:
        value = float(timed[1]) * _UNITS[timed[2]] if timed else float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds, nor a time such as 90s, 10m, 2h") from None
    if not math.isfinite(value) or value < 0:
        raise ArgumentTypeError(f"{text!r} must be a finite number of seconds, 0 or more")
    if value > _LONGEST_SECONDS:
        raise ArgumentTypeError(f"{text!r} must be at most {_LONGEST_SECONDS} seconds, a year")
    return value


def whole_seconds(text: str) -> int:
    """As `seconds`, but etcd grants leases by the second."""
    value = seconds(text)
    if not value.is_integer():
        raise ArgumentTypeError(f"{text!r} must be whole seconds (etcd's grain), such as 5")
    return int(value)


def node_range(text: str) -> tuple[int, int]:
    """`MIN:MAX` or one number for both."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip(), re.ASCII)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a number of nodes or MIN:MAX")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high:
        raise ArgumentTypeError(f"{text!r} must have 1 <= MIN <= MAX")
    return low, high


def interval(text: str) -> str:
    """`100` = every 100 steps, a time with its unit = every so long. Given back as `100` or `30s`, for the session."""
    counted, timed = re.fullmatch(r"\d+", text.strip(), re.ASCII), _WITH_UNIT.fullmatch(text.strip())
    if counted is None and timed is None:
        raise ArgumentTypeError(f"{text!r} is neither a number of steps (100) nor a time (30s, 5m)")
    value = f"{int(text)}" if counted else f"{seconds(text):.6f}".rstrip("0").rstrip(".")
    if value == "0":
        raise ArgumentTypeError(f"{text!r} must be more than 0; leave it out for no checkpoints")
    return value if counted else f"{value}s"


def steps(text: str) -> int:
    """A number of steps."""
    if not re.fullmatch(r"\d+", text.strip(), re.ASCII) or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number of steps, 1 or more")
    return int(text)


def names(text: str) -> list[str]:
    """Module names separated by commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ArgumentTypeError(f"{name!r} is not a module's name")
    return found


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[IPV6]:PORT`, `:PORT` (all interfaces) or `PORT` (this host only)."""
    host, colon, port = text.strip().rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65535:
        raise ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 0 to 65535")
    if not colon:
        return "127.0.0.1", int(port)
    if ":" in host and not host.startswith("["):
        raise ArgumentTypeError(f"{text!r} has no valid host; an IPv6 address is written [::1]:PORT")
    return _host(text, host) or "0.0.0.0", int(port)


def endpoints(text: str) -> str:
    """`h1,h2:2379,[::1]:2379` with the port that is meant filled in, each once, in the order given."""
    found = []
    for part in text.split(","):
        part = part.strip()
        if not part:
            raise ArgumentTypeError(f"{text!r} has an empty part between its commas")
        if "://" in part:
            raise ArgumentTypeError(f"{part!r}: write HOST:PORT without a scheme; TLS is chosen by --etcd-ca")
        host, port = part, str(ETCD_PORT)
        if re.search(r"[^:\]]:[^:\]]*$|\]:", part) and not re.fullmatch(
            r"[0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*", part
        ):
            host, _, port = part.rpartition(":")
        if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 1 <= int(port) <= 65535 or not _host(part, host):
            raise ArgumentTypeError(f"{part!r} is not HOST:PORT with a port of 1 to 65535")
        bare = _host(part, host)
        found.append(f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}")
    return ",".join(dict.fromkeys(found))


def _host(text: str, host: str) -> str:
    """Without the brackets of an IPv6 literal."""
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1]
    if "[" in host or "]" in host or re.search(r"[\s/@]", host):
        raise ArgumentTypeError(f"{text!r} has no valid host; an IPv6 address is written [::1]:PORT")
    return host


def shown(value: Any) -> str:
    """A value as it is written in a flag."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ":".join(f"[{part}]" if ":" in str(part) else str(part) for part in dict.fromkeys(value))
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
