"""Interfaces, the address that peers will use, names both ways, and ports."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from elastic.checks.finding import Finding, Host, error, ok, warning
from elastic.metrics.access import exposure

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU = 0x8913, 0x8915, 0x8921
_UP_AND_RUNNING = 0x41
_SLOW_LOOKUP_SECONDS = 0.5
_LEAST_PORTS = 8000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of this host."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    mtu: int = 0
    megabits: int = 0  # 0 = it does not say

    @property
    def shown(self) -> str:
        speed = f", {self.megabits} Mb/s" if self.megabits > 0 else ""
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}; MTU {self.mtu}{speed})"


def interfaces(host: Host) -> list[Interface]:
    """Those of this process's network namespace; /sys may show another one's, so it is asked for the speed alone."""
    found = []
    for _, name in socket.if_nameindex():
        flags, mtu = (_ask(name, request) for request in (_SIOCGIFFLAGS, _SIOCGIFMTU))
        found.append(
            Interface(
                name=name,
                addresses=(*_ipv4(name), *_ipv6(host, name)),
                is_up=flags is not None and struct.unpack("H", flags[:2])[0] & _UP_AND_RUNNING == _UP_AND_RUNNING,
                mtu=struct.unpack("i", mtu[:4])[0] if mtu is not None else 0,
                megabits=int(_text(host.sys / "class/net" / name / "speed") or 0),
            )
        )
    return found


def check_interfaces(found: Iterable[Interface]) -> Iterator[Finding]:
    """What there is."""
    usable = [interface for interface in found if interface.is_up and interface.addresses]
    if all(_is_loopback(address) for interface in usable for address in interface.addresses):
        yield warning("interfaces", "none but loopback has an address: no other host can be reached", "ip address add")
    else:
        yield ok("interfaces", "; ".join(interface.shown for interface in usable))
    versions = {ipaddress.ip_address(address).version for interface in usable for address in interface.addresses}
    yield ok("ip", " and ".join(f"IPv{version}" for version in sorted(versions)) or "none")


def check_address(address: str, found: Iterable[Interface], *, many: bool, store_is_local: bool) -> Iterator[Finding]:
    """The address that goes into this node's record, by which peers reach its store."""
    try:
        bare = str(ipaddress.ip_address(address))
    except ValueError:
        bare = _first_address(address)
    using = next((interface for interface in found if bare in interface.addresses), None)
    if not many:
        yield ok("address", "one node: workers meet on loopback")
    elif bare and _is_loopback(bare):
        message = f"{address} goes into this node's record, and other hosts cannot reach it"
        why = "etcd is named by a loopback address: name it as others see it" if store_is_local else "see /etc/hosts"
        yield warning("address", message, f"{why}, or give --local-addr")
    elif using is None:
        yield error("address", f"{address} is on no interface of this host", "give --local-addr ADDRESS")
    elif not using.is_up:
        yield error("address", f"{address} is on {using.shown}, which is down", f"ip link set {using.name} up")
    else:
        yield ok("address", f"{address} on {using.shown}: peers reach this node's store here")


def check_own_name(
    name: str, environ: Mapping[str, str], found: Iterable[Interface], *, many: bool
) -> Iterator[Finding]:
    """gloo connects by the host's own name, unless an interface is named."""
    interface = environ.get("GLOO_SOCKET_IFNAME", "")
    there = [candidate.name for candidate in found if candidate.is_up and candidate.addresses]
    if missing := [part for part in interface.split(",") if part and part not in there]:
        message = f"GLOO_SOCKET_IFNAME={interface}: {missing[0]} is none of {', '.join(there)}"
        yield error("gloo", message, "name an interface of this host that is up, or unset it")
    addresses = sorted({str(entry[4][0]) for entry in _lookup(name)})
    if many and not interface and (not addresses or all(map(_is_loopback, addresses))):
        shown = ", ".join(addresses) or "no address"
        message = f"{name} is {shown} here: gloo would tell peers to connect to that"
        yield warning("own name", message, "GLOO_SOCKET_IFNAME=<interface>, or the real address in /etc/hosts")
    else:
        yield ok("own name", f"{name} is {', '.join(addresses) or 'unknown here'}")


def check_nccl(settings: Mapping[str, str], found: Iterable[Interface]) -> Iterator[Finding]:
    """What NCCL is told, and whether the interfaces that it is told to use are there."""
    named = settings.get("NCCL_SOCKET_IFNAME", "")
    names = [interface.name for interface in found if interface.is_up and interface.addresses]
    if named and not any(_is_meant(name, named) for name in names):
        message = f"NCCL_SOCKET_IFNAME={named} fits none of {', '.join(names)}"
        yield error("nccl", message, "name an interface of this host that is up, in [nccl] or the environment")
    else:
        yield ok("nccl", ", ".join(f"{name}={value}" for name, value in settings.items()) or "no NCCL_ variable is set")


def _is_meant(name: str, pattern: str) -> bool:
    """As NCCL reads it: prefixes; after = whole names; after ^ all but those."""
    sign = re.match(r"\^?=?", pattern)
    signs = sign[0] if sign else ""
    parts = pattern[len(signs) :].split(",")
    hit = name in parts if "=" in signs else any(name.startswith(part) for part in parts)
    return hit != ("^" in signs)


def check_reverse(
    address: str, lookup: Callable[[str], str | None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Finding]:
    """torch's TCPStore asks for the name of each peer that connects: without an answer each connection waits."""
    began = clock()
    name = lookup(address)
    seconds = clock() - began
    shown = f"{address} is {name or 'of no name'}"
    if seconds > _SLOW_LOOKUP_SECONDS:
        message = f"{shown}; the answer took {seconds:.1f} s, and every connection to a store waits for one"
        yield warning("reverse name", message, "add it to /etc/hosts, or RES_OPTIONS='timeout:1 attempts:1'")
    else:
        yield ok("reverse name", shown)


def check_http(address: str, port: int) -> Iterator[Finding]:
    """Whether the agent can serve there."""
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        family, kind, _, _, place = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as exc:
        if exc.errno in (errno.EADDRINUSE, errno.EACCES):
            message = f"{where}: {exc.strerror}; the next free port would be used"
            yield warning("http port", message, "elasticd status shows whether an agent runs; else --http HOST:PORT")
        else:
            remedy = "give --http with an address of this host, such as --http [::1]:9431 where there is no IPv4"
            yield error("http port", f"{where} cannot be served: {exc.strerror or exc}", remedy)
    else:
        yield ok("http port", f"{where} is free" if port else f"{where.rpartition(':')[0]}, any port")


def check_exposure(host: str, *, token: bool, tls: bool) -> Iterator[Finding]:
    """Who else can ask there."""
    address = _first_address(host)
    risk = exposure(address, token=token, tls=tls) if address else ""
    if risk:
        message, _, remedy = risk.partition("; ")
        yield warning("http access", message, remedy)
    else:
        yield ok("http access", "this host alone" if not token else "who has the token")


def check_port_range(host: Host) -> Iterator[Finding]:
    """Stores, gloo and NCCL take any free port."""
    text = host.read("sys/net/ipv4/ip_local_port_range")
    if text is None:
        return
    low, high = map(int, text.split())
    count = high - low + 1
    if count < _LEAST_PORTS:
        message = f"{count} ports ({low}-{high}) for connections going out and for the stores of rounds"
        yield warning("port range", message, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    else:
        yield ok("port range", f"{low}-{high}: open it between the nodes, rounds take any port of it")


def reverse(address: str) -> str | None:
    """The name of an address; None where it has none."""
    try:
        return socket.gethostbyaddr(address)[0]
    except OSError:
        return None


def _first_address(name: str) -> str:
    return next((str(entry[4][0]) for entry in _lookup(name)), "")


def _lookup(name: str) -> list[tuple[object, object, object, object, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _ipv4(name: str) -> tuple[str, ...]:
    """Its first IPv4 address: what the kernel tells without netlink."""
    answer = _ask(name, _SIOCGIFADDR)
    return (socket.inet_ntoa(answer[4:8]),) if answer is not None else ()


def _ask(name: str, request: int) -> bytes | None:
    """What an ioctl puts behind the interface's name; None where it has no such thing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))[16:]
        except OSError:
            return None


def _ipv6(host: Host, name: str) -> tuple[str, ...]:
    """Without the link-local ones, which peers cannot use."""
    rows = [line.split() for line in (host.read("net/if_inet6") or "").splitlines()]
    found = [ipaddress.IPv6Address(int(row[0], 16)) for row in rows if row[-1] == name]
    return tuple(str(address) for address in found if not address.is_link_local)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of an interface that is down is EINVAL
        return ""
