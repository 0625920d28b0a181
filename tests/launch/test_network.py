"""Which interface leads to the others, on hosts whose networks are made for the purpose."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from phalanx import CannotHere, WrongUse
from phalanx.launch import network
from phalanx.launch.key import Key
from phalanx.launch.network import Way
from phalanx.launch.rendezvous import Rendezvous
from tests.hosts import Host, needs_namespaces


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("node1", "Write it as host:port"),
        ("node1:²", "Write it as host:port"),
        ("node1:65536", "Write it as host:port"),
        ("::1:29400", r"does not say where its port begins. Write it like \[fd00::1\]:29400"),
        ("[::]:29400", "means every address of every host"),
        ("0.0.0.0:29400", "means every address of every host"),
    ],
)
def test_what_is_no_address(address: str, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        network.parse(address)


def test_hosts_and_ports() -> None:
    assert network.parse("node1:29400") == ("node1", 29400)
    assert network.parse("[fe80::1%eth0]:29400") == ("fe80::1%eth0", 29400)


def test_loopback_stays_on_this_machine() -> None:
    assert network.way_to("127.0.0.1", 1) == Way(socket.AF_INET, "127.0.0.1", "127.0.0.1", "lo")
    assert network.way_to("localhost", 1).interface == "lo"
    assert network.way_to("::1", 1) == Way(socket.AF_INET6, "::1", "::1", "lo")
    with network.listen_alone() as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with network.listen("::1") as sock:
        assert sock.getsockname()[0] == "::1"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert network.variables("eth0") == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert network.variables("eth0", insist=True) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert network.variables("") == {}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """One that means 127.0.1.1 by its own name."""
    table = tmp_path / "hosts"
    table.write_text("127.0.0.1 localhost\n127.0.1.1 node1\n10.1.0.9 node9\n")
    one = Host("node1", table)
    yield one
    one.close()


def wired(host: Host, interface: str, *addresses: str) -> None:
    host.ip(f"link add {interface} type bridge")
    host.ip(f"link set {interface} addrgenmode none")  # no address but those given
    for address in addresses:
        host.ip(f"addr add {address} dev {interface}{' nodad' * (':' in address)}")
    host.ip(f"link set {interface} up")


def _listening(address: str | None) -> tuple:
    with network.listen_alone() if address is None else network.listen(address, interface="eth0") as sock:
        return sock.getsockname()


@needs_namespaces
def test_no_network_but_loopback(host: Host) -> None:
    assert host.ask(network.way_to, "node1", 1) == Way(socket.AF_INET, "127.0.1.1", "127.0.0.1", "lo")
    assert isinstance(host.ask(network.way_to, "node9", 1), OSError)


@needs_namespaces
def test_a_loopback_without_ipv4_and_one_that_is_down(host: Host) -> None:
    host.ip("addr del 127.0.0.1/8 dev lo")
    assert host.ask(_listening, None)[0] == "::1"
    host.ip("link set lo down")
    said = host.ask(network.listen_alone)
    assert isinstance(said, CannotHere)
    assert "Bring it up: ip link set lo up" in str(said)


@needs_namespaces
def test_the_interface_that_reaches_the_meeting(host: Host) -> None:
    wired(host, "eth0", "10.1.0.1/24", "fd01::1/64", "fe80::1/64")
    wired(host, "eth1", "10.2.0.1/24", "10.2.0.5/24")
    assert host.ask(network.way_to, "node9", 1) == Way(socket.AF_INET, "10.1.0.9", "10.1.0.1", "eth0")
    assert host.ask(network.way_to, "10.2.0.9", 1) == Way(socket.AF_INET, "10.2.0.9", "10.2.0.1", "eth1")
    assert host.ask(network.way_to, "fd01::9", 1) == Way(socket.AF_INET6, "fd01::9", "fd01::1", "eth0")
    there = host.ask(network.way_to, "fe80::9%eth0", 1)
    assert there == Way(socket.AF_INET6, "fe80::9", "fe80::1", "eth0")
    assert host.ask(network.scoped, there.own, there.interface) == "fe80::1%eth0"
    assert host.ask(_listening, there.own)[3] > 0
    asked = host.ask(network.way_to, "node9", 1, "eth1")
    assert asked == Way(socket.AF_INET, "10.1.0.9", "10.2.0.1", "eth1")
    said = host.ask(network.way_to, "fd01::9", 1, "eth1")
    assert "--interface eth1 has no IPv6 address, as the rendezvous has. Name another of lo (127.0.0.1), eth0" in str(
        said
    )
    said = host.ask(network.check_interface, "eth7")
    assert "no such interface with an address. Name one of lo (127.0.0.1), eth0 (10.1.0.1), eth1 (10.2.0.1)" in str(
        said
    )


@needs_namespaces
def test_a_name_that_means_loopback_here_means_another_address_to_others(host: Host) -> None:
    wired(host, "eth0", "10.1.0.1/24", "fd01::1/64")
    assert host.ask(network.way_to, "node1", 1) == Way(socket.AF_INET, "10.1.0.1", "10.1.0.1", "eth0")
    wired(host, "eth1", "10.2.0.1/24")
    said = host.ask(network.way_to, "node1", 1)
    assert isinstance(said, CannotHere)
    assert "no default route to tell which" in str(said)
    assert "Say which with --interface" in str(said)
    assert host.ask(network.way_to, "node1", 1, "eth0") == Way(socket.AF_INET, "10.1.0.1", "10.1.0.1", "eth0")
    host.ip("route add default via 10.2.0.254")
    assert host.ask(network.way_to, "node1", 1) == Way(socket.AF_INET, "10.2.0.1", "10.2.0.1", "eth1")


def _listening_hosts(address: str, interface: str | None) -> list[str]:
    """Where a host listens that has opened a rendezvous, and is ready to open its ranks' store."""
    seat = Rendezvous(address, key=Key(), name="run", ranks=1, min_nodes=1, max_nodes=1, interface=interface)
    with closing(seat) as rendezvous:
        met = rendezvous.next()
        assert met is not None
        assert met.listening is not None
        with met.listening:
            lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    packed = [bytes.fromhex(fields[1].partition(":")[0])[::-1] for fields in lines if fields[3] == "0A"]
    return sorted(socket.inet_ntoa(address) for address in packed)


@needs_namespaces
def test_a_meeting_and_a_store_listen_at_one_address(host: Host) -> None:
    wired(host, "eth0", "10.1.0.1/24")
    assert host.ask(_listening_hosts, "node1:29400", None) == ["10.1.0.1", "10.1.0.1"]
    assert host.ask(_listening_hosts, "localhost:29400", None) == ["127.0.0.1", "127.0.0.1"]
    wired(host, "eth1", "10.2.0.1/24")
    assert host.ask(_listening_hosts, "10.1.0.1:29400", "eth1") == ["10.1.0.1", "10.2.0.1"]
