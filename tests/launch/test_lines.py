"""Lines: messages arrive whole, between those who know the key; a break is a fact, and a forked child holds nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from phalanx.launch.key import Key
from phalanx.launch.lines import CHALLENGE_BYTES, LARGEST, MAGIC, Line, packed, ready

KEY = Key(b"of these tests")


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("localhost", 0)) as door:
        return socket.create_connection(door.getsockname()), door.accept()[0]


def prove(*lines: Line) -> None:
    """Let both ends speak until they have proven themselves or broken off."""
    deadline = time.monotonic() + 5
    while not all(line.proven or line.broken for line in lines) and time.monotonic() < deadline:
        ready([line for line in lines if not line.broken], 0.1)
        assert [found for line in lines for found in line.receive()] == []


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    theirs, ours = sockets()
    one, other = Line(theirs, KEY, "test"), Line(ours, KEY, "test", accepted=True)
    prove(one, other)
    assert one.proven
    assert other.proven
    yield one, other
    one.close()
    other.close()


def heard(line: Line) -> list[bytes]:
    assert ready([line], 5.0)
    return line.receive()


def test_messages_arrive_whole_however_large(ends: tuple[Line, Line]) -> None:
    one, other = ends
    one.send(b"x" * LARGEST)  # more than the kernel takes at once
    one.send(packed(b"last"))
    assert one.unsent
    found: list[bytes] = []
    while len(found) < 2:
        assert ready([one, other], 5.0)
        one.flush()
        found += other.receive()
    assert [len(message) for message in found] == [LARGEST, 4]
    assert not other.broken


def test_a_message_that_is_too_large_ends_it(ends: tuple[Line, Line]) -> None:
    one, other = ends
    one.send(b"x" * (LARGEST + 1))
    assert heard(other) == []
    assert other.strange


def test_last_words_are_heard_before_the_break(ends: tuple[Line, Line]) -> None:
    one, other = ends
    other.send(b"1")  # unread when the other end hangs up
    one.send(b"2")
    one.close()
    assert heard(other) == [b"2"]
    other.send(b"3")
    deadline = time.monotonic() + 5
    while not other.broken and time.monotonic() < deadline:
        other.receive()
    assert other.broken


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n", b"[" * 200_000, b"\xff\n", os.urandom(4096), MAGIC + bytes(64)]
)
@pytest.mark.parametrize("accepted", [True, False])
def test_who_does_not_prove_it_is_a_stranger(words: bytes, accepted: bool) -> None:
    theirs, ours = sockets()
    line = Line(ours, KEY, "test", accepted=accepted)
    theirs.setblocking(False)
    theirs.send(words)
    while not line.broken:
        assert ready([line], 5.0)
        assert line.receive() == []
    assert line.strange
    assert not line.proven
    line.close()
    theirs.close()


@pytest.mark.parametrize(("key", "purpose"), [(Key(b"another"), "test"), (Key(), "test"), (KEY, "store at port 1")])
def test_another_key_or_purpose_proves_nothing_and_learns_nothing(key: Key, purpose: str) -> None:
    theirs, ours = sockets()
    one, other = Line(theirs, key, purpose), Line(ours, KEY, "test", accepted=True)
    while not other.broken:
        ready([one, other], 5.0)
        one.receive()
        other.receive()
    other.close()
    while not one.broken:
        assert ready([one], 5.0)
        assert one.receive() == []
    assert one.tried
    assert not one.proven
    one.close()


def test_what_was_recorded_or_is_sent_back_proves_nothing() -> None:
    """A stranger between two who know the key: their first words, again, and a server's challenge sent back to it."""
    recorded = bytearray()
    theirs, ours = sockets()
    client = Line(theirs, KEY, "test")
    challenge = MAGIC + bytes(32)
    ours.send(challenge)
    while len(recorded) < CHALLENGE_BYTES + 32:
        ready([client], 1.0)
        client.receive()
        ours.settimeout(5.0)
        recorded += ours.recv(200)
    ours.send(bytes(recorded[CHALLENGE_BYTES:]))  # its own proof, sent back as the server's
    while not client.broken:
        assert ready([client], 5.0)
        client.receive()
    assert not client.proven
    client.close()
    ours.close()
    stranger, ours = sockets()
    server = Line(ours, KEY, "test", accepted=True)
    stranger.send(recorded)  # what a host said to another challenge
    while not server.broken:
        assert ready([server], 5.0)
        server.receive()
    assert not server.proven
    server.close()
    stranger.close()


@pytest.mark.parametrize("harm", ["changed", "repeated", "left out", "sent back"])
def test_a_message_that_was_tampered_with_ends_it(ends: tuple[Line, Line], harm: str) -> None:
    one, other = ends
    kept = []
    with mock.patch.object(Line, "flush"):
        for word in (b"first", b"second"):
            one.send(word)
            kept.append(bytes(one.unsent))
            one.unsent.clear()
    first, second = kept
    if harm == "sent back":
        other.sock.send(first)
        assert heard(one) == []
        assert one.strange
        return
    one.sock.send({"changed": first[:-1] + b"?", "repeated": first + first, "left out": second}[harm])
    assert heard(other) == ([b"first"] if harm == "repeated" else [])
    assert other.strange


def test_a_forked_child_does_not_keep_a_line_open(ends: tuple[Line, Line]) -> None:
    one, other = ends
    child = os.fork()
    if not child:
        time.sleep(20)
        os._exit(0)
    try:
        one.close()
        assert ready([other], 5.0)
        other.receive()
        assert other.broken
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
