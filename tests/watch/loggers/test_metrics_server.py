"""The page of a rank that trains: whoever asks, and however, it holds few descriptors, one thread, and little time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from phalanx.watch.loggers.metrics_server import ASKED_SECONDS, LARGEST_REQUEST, MOST_CONNECTIONS, MetricsServer
from tests.ports import free_port

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    server = MetricsServer("127.0.0.1", number, lambda: "loss 0.5\n" * 50_000)
    yield number
    server.close()


def answer(port: int, request: bytes = GET, seconds: float = 30.0) -> bytes:
    """What comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), seconds) as line:
        line.sendall(request)
        found = b""
        try:
            while part := line.recv(1 << 16):
                found += part
        except ConnectionError:
            pass
        return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_requests_and_what_they_are_answered(port: int) -> None:
    head, _, body = answer(port).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert body == b"loss 0.5\n" * 50_000, "all of it, however much of it a socket takes at once"
    assert answer(port, b"HEAD /metrics HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
    assert answer(port, b"GET /metrics?x=1 HTTP/1.0\n\n").startswith(b"HTTP/1.1 200")
    assert answer(port, b"GET /../etc/passwd HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
    assert answer(port, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405")
    for nothing in (b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"GET\r\n\r\n"):
        assert answer(port, nothing).startswith(b"HTTP/1.1 40")


def test_what_is_no_request_is_let_go_of(port: int) -> None:
    assert answer(port, b"x" * (LARGEST_REQUEST + 1)) == b""
    began = time.monotonic()
    assert answer(port, b"GET /met") == b"", "no answer to half a request"
    assert time.monotonic() - began > ASKED_SECONDS / 2


def test_hundreds_of_half_requests_hold_few_descriptors_and_one_thread(port: int) -> None:
    with ExitStack() as held:
        before, threads = descriptors(), threading.active_count()
        for _ in range(300):
            line = held.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(("127.0.0.1", port))
        deadline, most, ours = time.monotonic() + 3, 0, 300
        while time.monotonic() < deadline:
            most = max(most, descriptors() - before - ours)
            assert threading.active_count() <= threads
            time.sleep(0.02)
        assert most <= MOST_CONNECTIONS + 1


def test_somebody_else_is_answered_while_connections_are_dripped_on(port: int) -> None:
    over = threading.Event()

    def drip() -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as line:
                    while not over.wait(0.1):
                        line.sendall(b"G")
            except OSError:
                over.wait(0.05)

    attackers = [threading.Thread(target=drip) for _ in range(2 * MOST_CONNECTIONS)]
    for attacker in attackers:
        attacker.start()
    try:
        time.sleep(0.5)
        assert answer(port).endswith(b"loss 0.5\n")
    finally:
        over.set()
        for attacker in attackers:
            attacker.join()


def test_a_flood_of_requests_takes_little_of_this_process(port: int) -> None:
    over, counts = threading.Event(), [0]

    def ask() -> None:
        while not over.is_set():
            try:
                answer(port, b"HEAD /metrics HTTP/1.1\r\n\r\n", 5)
                counts[0] += 1
            except OSError:
                pass

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    began = time.monotonic()
    time.sleep(1.5)
    over.set()
    for asker in askers:
        asker.join()
    assert 0 < counts[0] <= 25 * MOST_CONNECTIONS * (time.monotonic() - began)


def test_it_ends_at_once_and_lets_go_of_its_port() -> None:
    number = free_port()
    MetricsServer("127.0.0.1", number, lambda: "").close()
    MetricsServer("127.0.0.1", number, lambda: "").close()
    with pytest.raises(ConnectionRefusedError):
        answer(number)
