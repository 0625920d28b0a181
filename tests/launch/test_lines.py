"""Lines: messages arrive whole, a break is a fact, and a forked child holds nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from phalanx.launch.lines import Line, ready


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    with socket.create_server(("localhost", 0)) as door:
        one = Line(socket.create_connection(door.getsockname()))
        other = Line(door.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_whole_however_large(ends: tuple[Line, Line]) -> None:
    one, other = ends
    one.send(word="x" * (1 << 22))  # more than the kernel takes at once
    one.send(word="last")
    assert one.unsent
    found = []
    while len(found) < 2:
        assert ready([one, other], 5.0)
        one.flush()
        found += other.receive()
    assert [len(message["word"]) for message in found] == [1 << 22, 4]
    assert not other.broken


def test_last_words_are_heard_before_the_break(ends: tuple[Line, Line]) -> None:
    one, other = ends
    other.send(question=1)  # unread when the other end hangs up
    one.send(answer=2)
    one.close()
    assert ready([other], 5.0)
    assert other.receive() == [{"answer": 2}]
    other.send(question=3)
    deadline = time.monotonic() + 5
    while not other.broken and time.monotonic() < deadline:
        other.receive()
    assert other.broken


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\n"])
def test_words_that_are_no_message_are_strange(ends: tuple[Line, Line], words: bytes) -> None:
    one, other = ends
    one.sock.sendall(words)
    assert ready([other], 5.0)
    assert other.receive() == []
    assert other.strange
    assert other.broken


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
