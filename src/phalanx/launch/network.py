"""Which of this host's networks leads to the others: the address by which they reach it, and the interface that has it.

gloo on its own takes the address that the host's name resolves to, which on many machines is 127.0.1.1, and NCCL the
first interface it likes. What reaches the rendezvous reaches the other hosts too, so its interface is named to both.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CannotHere, WrongUse

FAR = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that nobody has: only the default route leads there."""
PACKED = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""Where in a socket's address, as the C library has it, the address itself begins, and its bytes."""


@dataclass(frozen=True)
class Way:
    """How this host and a place reach each other."""

    family: socket.AddressFamily
    to: str
    """The place's address."""
    own: str
    """This host's, on the same network."""
    interface: str
    """Which has it; "" where that cannot be told."""


class _Entry(ctypes.Structure):
    """The C library's ``struct ifaddrs``, as far as it is read here."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def addresses() -> list[tuple[str, str]]:
    """Every interface's addresses, in the order in which gloo and NCCL find them; none where it cannot be told."""
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        return []
    found = []
    at = first.value
    while at:
        entry = _Entry.from_address(at)
        at = entry.next
        if not entry.address:
            continue
        family = ctypes.c_ushort.from_address(entry.address).value
        if family in PACKED:
            start, length = PACKED[family]
            text = socket.inet_ntop(family, ctypes.string_at(entry.address + start, length))
            found.append((os.fsdecode(entry.name), text))
    libc.freeifaddrs(first)
    return found


def check_interface(name: str) -> None:
    """Refuse an interface that this host does not have, or that has no address."""
    if sys.platform != "linux":
        raise WrongUse(f"--interface {name} has an effect on Linux only. Leave it out.")
    if name not in (known for known, _ in addresses()):
        raise WrongUse(f"--interface {name}: this host has no such interface with an address. Name one of {_listed()}.")


def parse(address: str) -> tuple[str, int]:
    """The host and the port of ``host:port``, as the command line has it."""
    at, colon, port = address.rpartition(":")
    if not (colon and at and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise WrongUse(f"{address!r} is no address to meet at. Write it as host:port, like node1:29400.")
    if ":" in at and not (at.startswith("[") and at.endswith("]")):
        raise WrongUse(f"{address!r} does not say where its port begins. Write it like [fd00::1]:29400.")
    if at in ("0.0.0.0", "[::]"):
        raise WrongUse(f"{at} means every address of every host. Give the one by which all hosts reach one of them.")
    return at.strip("[]"), int(port)


def way_to(name: str, port: int, interface: str | None = None, as_named: bool = False) -> Way:
    """How the host of that name or address is reached, and how it, and others, reach this one.

    A name that means this machine to itself (127.0.1.1 on many) means another address to others: one of the interface
    asked for, the only one there is, or the one that the default route takes; unless ``as_named``.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # machines without IPv6 still list ::1 as localhost
    failure: Exception | None = None
    for family, _, _, _, where in found:
        to = str(where[0]).partition("%")[0]
        scope = int(where[-1]) if family == socket.AF_INET6 else 0
        if is_loopback(to) and not (as_named or name == "localhost" or is_loopback(name)):
            to = _known_to_others(to, interface)
        try:
            if interface is not None:
                return Way(_family(to), to, _first(interface, to), interface)
            own = _source(to, scope)
            return Way(_family(to), to, own, socket.if_indextoname(scope) if scope else interface_of(own))
        except (OSError, CannotHere) as error:
            failure = failure or error
    raise failure or OSError(f"{name} has no address")


def interface_of(address: str) -> str:
    """The interface that has an address of this host; "" if none is known to."""
    if is_loopback(address):  # 127.0.0.1 to 127.255.255.254 are all there, and one is listed
        return next((name for name, known in addresses() if is_loopback(known)), "")
    return next((name for name, known in addresses() if known == address), "")


def _known_to_others(loopback: str, interface: str | None) -> str:
    """This host's address for those who know it by name; what it has itself if there is no network."""
    for family in (socket.AF_INET, socket.AF_INET6):
        ours = [(name, known) for name, known in addresses() if _family(known) == family and not _narrow(known)]
        if interface is not None:
            ours = [(name, known) for name, known in ours if name == interface][:1]
        if len(ours) == 1:
            return ours[0][1]
        if ours:
            try:
                return _source(FAR[family])
            except OSError:
                raise CannotHere(
                    f"this host's name means {loopback} to itself, and there is no default route to tell which of its "
                    f"addresses others know: {_listed()}. Say which with --interface."
                ) from None
    return loopback


def _source(to: str, scope: int = 0) -> str:
    """The address that this host would speak from. Nothing is sent."""
    with socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        sock.connect((to, 9, 0, scope) if ":" in to else (to, 9))
        return str(sock.getsockname()[0]).partition("%")[0]


def _first(interface: str, to: str) -> str:
    """The address of an interface that others are told, of the kind that the rendezvous has."""
    local = ipaddress.ip_address(to).is_link_local
    ours = [known for name, known in addresses() if name == interface and _family(known) == _family(to)]
    ours = [known for known in ours if local or not ipaddress.ip_address(known).is_link_local]
    if not ours:
        kind = "IPv6" if ":" in to else "IPv4"
        raise CannotHere(
            f"--interface {interface} has no {kind} address, as the rendezvous has. Name another of {_listed()}."
        )
    return ours[0]


def sockaddr(address: str, port: int, interface: str = "") -> tuple[Any, ...]:
    """What a socket is bound or connected to; a link-local address means something on an interface only."""
    if _family(address) == socket.AF_INET:
        return address, port
    scoped = interface and ipaddress.ip_address(address).is_link_local
    return address, port, 0, socket.if_nametoindex(interface) if scoped else 0


def scoped(address: str, interface: str) -> str:
    """An address as this host must write it."""
    try:
        return f"{address}%{interface}" if ipaddress.IPv6Address(address).is_link_local else address
    except ValueError:
        return address


def listen(address: str, port: int = 0, interface: str = "", backlog: int = 1024) -> socket.socket:
    """A socket that listens at one address of this host, never at all of them."""
    family = _family(address)
    if family == socket.AF_INET:
        return socket.create_server((address, port), backlog=backlog)
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(sockaddr(address, port, interface))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_alone() -> socket.socket:
    """A socket that listens to this machine only."""
    for address in ("127.0.0.1", "::1"):
        try:
            return listen(address)
        except OSError as error:
            reason = error.strerror
    raise CannotHere(f"nothing can listen on this machine's loopback ({reason}). Bring it up: ip link set lo up.")


def variables(interface: str, insist: bool = False) -> dict[str, str]:
    """What tells gloo and NCCL to use an interface; what the user has set stays, unless ``insist``."""
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    return {name: value for name, value in wanted.items() if insist or name not in os.environ}


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _narrow(address: str) -> bool:
    """Whether an address means something on this machine, or on one link, only."""
    known = ipaddress.ip_address(address)
    return known.is_loopback or known.is_link_local


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listed() -> str:
    return ", ".join(f"{name} ({address})" for name, address in addresses())
