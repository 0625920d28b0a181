"""A host's seat: what it agrees to, and what it says where there is no way to the rendezvous."""

from __future__ import annotations

import socket

import pytest

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch import network
from phalanx.launch.key import Key
from phalanx.launch.seat import Seat


def seat(address: str = "localhost:29400", ranks: int = 1, nodes: int = 2, silence: float = 5.0) -> Seat:
    return Seat(
        address, key=Key(), name="run", ranks=ranks, min_nodes=nodes, max_nodes=2, silence=silence, terms={"a": 1}
    )


def test_what_hosts_compare() -> None:
    assert seat().agreed == {"run": "'run'", "nodes": "[2, 2]", "silence": "5.0", "a": "1"}
    assert seat().host == socket.gethostname()
    assert seat() != seat()  # each is somebody's own


def test_what_cannot_be_brought_is_refused() -> None:
    with pytest.raises(WrongUse, match="Bring at least one"):
        seat(ranks=0)
    with pytest.raises(WrongUse, match="Ask for 1 <= min <= max"):
        seat(nodes=3)
    with pytest.raises(WrongUse, match=r"Wait at least 0\.5 s"):
        seat(silence=0.1)


def test_a_door_is_opened_on_the_way_to_the_meeting() -> None:
    one = seat()
    door = one.new_door(None)
    assert door is not None
    with door:
        assert door.getsockname()[0] == one.way.own


def test_without_a_way_it_says_so_or_waits_if_it_was_in_before() -> None:
    lost = seat("no-such-host.invalid:29400")
    with pytest.raises(CannotHere, match="is not known here"):
        lost.new_door(None)
    lost.met = True
    assert lost.new_door(lambda: True) is None


def test_a_pod_waits_for_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    early = seat("no-such-host.invalid:29400")
    assert early.new_door(lambda: True) is None


def test_an_address_that_changed_is_found() -> None:
    one = seat("localhost:29400")
    one.look_again()
    assert one.way.to == "127.0.0.1"
    one.at = "no-such-host.invalid"
    one.look_again()
    assert one.way.to == "127.0.0.1"


def test_refusals_end_in_what_to_do() -> None:
    for refusal in (seat().turned_away(), seat().stranger(), seat().nobody()):
        assert "localhost:29400" in str(refusal)


def test_a_store_does_not_take_the_port_of_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = network.listen
    with network.listen_alone() as free:
        port = free.getsockname()[1]
    ports = [port, 0]  # what the system might give
    monkeypatch.setattr(network, "listen", lambda address, interface: plain(address, ports.pop(0), interface))
    door = seat(f"127.0.0.1:{port}").new_door(None)
    assert door is not None
    assert not ports
    with door, plain("127.0.0.1", port):
        assert door.getsockname()[1] != port
