"""What the doctor says of addresses, interfaces and ports."""

from __future__ import annotations

import socket

import pytest

from elastic.checks import network
from elastic.checks.finding import Host
from tests.doctor.findings import only, states

LOOPBACK = network.Interface(name="lo", addresses=("127.0.0.1", "::1"), is_up=True, mtu=65536)
ETH0 = network.Interface(name="eth0", addresses=("10.0.0.5", "fd00::5"), is_up=True, mtu=9000, megabits=25000)
DOWN = network.Interface(name="eth1", addresses=("10.1.0.5",), is_up=False)
HERE = [LOOPBACK, ETH0, DOWN]


def test_interfaces_and_their_protocols_are_told() -> None:
    found = list(network.check_interfaces(HERE))
    assert states(found) == ["ok", "ok"]
    assert "eth0 (10.0.0.5, fd00::5; MTU 9000, 25000 Mb/s)" in found[0].message
    assert found[1].message == "IPv4 and IPv6"
    assert states(network.check_interfaces([LOOPBACK, DOWN])) == ["warning", "ok"]


@pytest.mark.parametrize(
    ("address", "many", "state", "text"),
    [
        ("127.0.0.1", False, "ok", "one node"),
        ("127.0.0.1", True, "warning", "other hosts cannot reach it"),
        ("10.0.0.5", True, "ok", "on eth0"),
        ("10.1.0.5", True, "error", "which is down"),
        ("10.9.9.9", True, "error", "on no interface"),
    ],
)
def test_the_address_that_peers_will_use(address: str, many: bool, state: str, text: str) -> None:
    found = only(network.check_address(address, HERE, many=many, store_is_local=False))
    assert (found.state, text in found.message) == (state, True)


def test_the_interfaces_of_this_host_are_found() -> None:
    found = {interface.name: interface for interface in network.interfaces(Host())}
    assert "127.0.0.1" in found["lo"].addresses
    assert found["lo"].is_up
    assert found["lo"].mtu > 0
    assert all(network.check_interfaces(found.values()))


def test_a_host_that_is_loopback_to_itself_is_a_warning_for_many_nodes_unless_gloo_is_told() -> None:
    assert only(network.check_own_name("localhost", {}, HERE, many=True)).state == "warning"
    assert only(network.check_own_name("no-such-host.invalid", {}, HERE, many=True)).state == "warning"
    assert only(network.check_own_name("localhost", {}, HERE, many=False)).state == "ok"
    assert only(network.check_own_name("localhost", {"GLOO_SOCKET_IFNAME": "eth0"}, HERE, many=True)).state == "ok"
    bad, _ = network.check_own_name("localhost", {"GLOO_SOCKET_IFNAME": "eth0,no0"}, HERE, many=False)
    assert (bad.check, bad.state) == ("gloo", "error")
    assert "no0 is none of lo, eth0" in bad.message


@pytest.mark.parametrize(
    ("named", "state"),
    [("eth0", "ok"), ("eth", "ok"), ("=eth", "error"), ("=eth0,ib0", "ok"), ("^lo", "ok"), ("ib0", "error"),
     ("^lo,eth", "error"), ("eth1", "error")],
)  # fmt: skip
def test_the_interface_that_nccl_is_told_must_be_there(named: str, state: str) -> None:
    found = only(network.check_nccl({"NCCL_SOCKET_IFNAME": named}, HERE))
    assert found.state == state
    assert named in found.message


def test_a_slow_reverse_lookup_is_a_warning() -> None:
    clocks = iter([0.0, 5.0])
    slow = only(network.check_reverse("10.0.0.5", lambda _: None, lambda: next(clocks)))
    assert (slow.state, "5.0 s" in slow.message) == ("warning", True)
    assert only(network.check_reverse("10.0.0.5", lambda _: "n1")).message == "10.0.0.5 is n1"


def test_a_http_port_that_is_taken_is_a_warning_and_a_host_that_is_not_ours_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        assert only(network.check_http("127.0.0.1", taken.getsockname()[1])).state == "warning"
    assert only(network.check_http("127.0.0.1", 0)).state == "ok"
    foreign = only(network.check_http("203.0.113.1", 9431))
    assert (foreign.state, "--http" in foreign.remedy) == ("error", True)
