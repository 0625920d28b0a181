"""What hosts bring after the rendezvous server has moved, and what it does not take. Rounds: ``test_rendezvous``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.launch import messages
from phalanx.launch.key import Key
from phalanx.launch.lines import Line, ready
from phalanx.launch.messages import Book, Message, decoded, encoded
from phalanx.launch.rendezvous_server import PURPOSE, VERSION, RendezvousServer

KEY = Key(b"of these tests")
TERMS = {"run": "'run'"}


@pytest.fixture
def rendezvous_server() -> Iterator[RendezvousServer]:
    one = RendezvousServer(socket.create_server(("localhost", 0)), KEY, "a", TERMS, (2, 2), silence=5.0, last_call=1.0)
    yield one
    one.close()


def come(rendezvous_server: RendezvousServer) -> Line:
    """A connection of somebody who knows the key."""
    line = Line(socket.create_connection(rendezvous_server.listener.sock.getsockname()), KEY, PURPOSE)
    while not line.proven:
        assert ready([line], 5.0)
        assert line.receive() == []
        assert not line.broken
    return line


def say(rendezvous_server: RendezvousServer, *payloads: bytes) -> tuple[Line, list[Message]]:
    """What the rendezvous server answers, until it hangs up or has answered."""
    line = come(rendezvous_server)
    for payload in payloads:
        line.send(payload)
    found: list[Message] = []
    while not found and not line.broken and ready([line], 5.0):
        found += heard(line)
    return line, found


def heard(line: Line) -> list[Message]:
    return [message for message in map(decoded, line.receive()) if not isinstance(message, messages.Heartbeat)]


def hello(book: Book, **other: Any) -> bytes:
    usual: dict[str, Any] = {"version": VERSION, "host": "b", "token": "1", "terms": TERMS}
    return encoded(messages.Hello(**usual | {"book": book} | other))


def test_a_host_brings_the_round_it_is_in(rendezvous_server: RendezvousServer) -> None:
    line, answers = say(
        rendezvous_server, hello(Book(generation=5, hosts=["b", "c"], ranks=[1, 1], facts={"resume": "step 40"}))
    )
    assert answers[0] == messages.Welcome("a", 5)
    other, answers = say(rendezvous_server, hello(Book(generation=4, hosts=["c", "d"], ranks=[1, 1]), host="d"))
    assert answers[0] == messages.Welcome("a", 5)  # and so it knows that the others went on
    assert (rendezvous_server.book.generation, rendezvous_server.book.hosts) == (5, ["b", "c"])
    line.close()
    other.close()


def test_a_host_that_was_started_anew_is_no_member_of_the_round_it_was_in(rendezvous_server: RendezvousServer) -> None:
    line, _ = say(rendezvous_server, hello(Book(generation=5, hosts=["b", "c"], ranks=[1, 1])))
    other, answers = say(rendezvous_server, hello(Book(), host="c", token="2"))
    assert answers[0] == messages.Welcome("a", 5)
    assert rendezvous_server.book.over == "host c was lost: it came back without its ranks"
    news: list[Book] = []
    while not news or not news[-1].over:
        assert ready([line], 5.0)
        news += [message.book for message in heard(line) if isinstance(message, messages.News)]
    assert not [message for message in answers + heard(other) if isinstance(message, messages.News)]
    line.close()
    other.close()


@pytest.mark.parametrize(
    "payloads",
    [
        [b"[" * 200_000],
        [b'["Join", {}]'],
        [encoded(messages.Failed(0, "x"))],
        [hello(Book()).replace(b'"b"', b'["b"]')],
        [hello(Book()).replace(b'"hosts": []', b'"hosts": 7')],
        [hello(Book()), b'["Join", {}]'],
        [hello(Book()), encoded(messages.Welcome("a", 7))],
        [b"\xff\xfe"],
    ],
)
def test_what_no_host_says_ends_that_connection_and_nothing_else(
    rendezvous_server: RendezvousServer, payloads: list[bytes]
) -> None:
    line, _ = say(rendezvous_server, *payloads)
    while not line.broken:
        assert ready([line], 5.0)
        line.receive()
    line.close()
    other, answers = say(rendezvous_server, hello(Book(), host="c"))
    assert answers == [messages.Welcome("a", 0)]
    other.close()


def test_a_guest_that_reads_nothing_holds_up_nobody(rendezvous_server: RendezvousServer) -> None:
    """And when it reads again it gets the newest news, not all that it has missed."""
    book = Book(generation=5, hosts=["b", "c"], ranks=[1, 1], facts={f"fact {n}": "x" * 60_000 for n in range(20)})
    deaf, _ = say(rendezvous_server, hello(book))
    line, _ = say(rendezvous_server, hello(book, host="c", token="2"))
    for number in range(15):
        deaf.send(encoded(messages.Heartbeat()))
        line.send(encoded(messages.Fact(5, "newest", str(number))))
        until(line, number)
    assert max(len(guest.line.unsent) for guest in rendezvous_server.guests) < 1 << 22, (
        "kept for one that does not read"
    )
    until(deaf, 14)
    deaf.close()
    line.close()


def until(line: Line, number: int) -> None:
    """Read until the newest fact is this one."""
    newest = ""
    while newest != str(number):
        assert ready([line], 5.0)
        assert not line.broken
        line.flush()
        for message in heard(line):
            if isinstance(message, messages.News):
                newest = message.book.facts.get("newest", "")
