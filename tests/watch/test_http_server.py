"""A server that strangers cannot hold: requests that drip, connections that are too many, answers nobody takes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from phalanx.watch import http_server
from phalanx.watch.http_server import BoundedHandler, BoundedServer

ASKED = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Greeting(BoundedHandler):
    protocol_version = "HTTP/1.1"
    held = threading.Event()
    held.set()
    body = b"hello"

    def do_GET(self) -> None:
        assert self.held.wait(20)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)


@contextmanager
def serving(handler: Any = Greeting, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    with BoundedServer((host, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield (host, server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
            deadline = time.monotonic() + 20
            while server._open:  # no thread of a connection is left to the next test
                assert time.monotonic() < deadline
                time.sleep(0.01)


def asked(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(ASKED)
        found = b""
        while not found.endswith(b"hello"):
            more = connection.recv(1 << 16)
            if not more:
                return found
            found += more
        return found


def drip(connection: socket.socket, over: threading.Event) -> None:
    with suppress(OSError):
        while not over.wait(0.05):
            connection.sendall(b"G")


def test_several_requests_of_one_connection() -> None:
    with serving() as address, socket.create_connection(address, timeout=20) as connection:
        for _ in range(3):
            connection.sendall(ASKED)
            found = b""
            while not found.endswith(b"hello"):
                found += connection.recv(1 << 16)


def test_a_request_that_drips_is_let_go_however_often_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)
    over = threading.Event()
    with serving() as address, socket.create_connection(address, timeout=20) as connection:
        dripping = threading.Thread(target=drip, args=(connection, over))
        began = time.monotonic()
        dripping.start()
        try:
            with suppress(ConnectionError):
                assert connection.recv(100) == b""
            assert 0.3 < time.monotonic() - began < 10
        finally:
            over.set()
            dripping.join()


def test_headers_without_end_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_BYTES", 4096)
    with serving() as address, socket.create_connection(address, timeout=20) as connection, suppress(ConnectionError):
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 1000)
        assert not connection.recv(100).startswith(b"HTTP/1.1 200")


def test_those_who_drip_do_not_keep_others_out() -> None:
    """As many as there may be, none of which ever sends a whole request: each new one takes the place of one."""
    over = threading.Event()
    with serving() as address, ExitStack() as held:
        held.callback(over.set)
        for _ in range(http_server.MOST_CONNECTIONS):
            connection = held.enter_context(socket.create_connection(address, timeout=20))
            connection.sendall(b"GET / HT")
        began = time.monotonic()
        for _ in range(5):
            assert asked(address).endswith(b"hello")
        assert time.monotonic() - began < http_server.HEAD_SECONDS / 2


def test_connections_that_are_being_answered_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(Greeting, "held", threading.Event())
    found: list[bytes] = []
    with serving() as address:
        threads = [threading.Thread(target=lambda: found.append(asked(address))) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline, refused = time.monotonic() + 20, False
        while not refused and time.monotonic() < deadline:
            with socket.create_connection(address, timeout=20) as third, suppress(TimeoutError):
                third.settimeout(0.5)
                try:
                    refused = third.recv(10) == b""
                except ConnectionError:
                    refused = True
        Greeting.held.set()
        for thread in threads:
            thread.join()
    assert refused
    assert [each[-5:] for each in found] == [b"hello"] * 2


def test_an_answer_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(Greeting, "body", b"h" * (64 << 20))
    with serving() as address, socket.create_connection(address, timeout=20) as connection:
        connection.sendall(ASKED)
        assert connection.recv(10)
        monkeypatch.setattr(Greeting, "body", b"hello")
        deadline = time.monotonic() + 20
        answer = b""
        while not answer.endswith(b"hello"):
            assert time.monotonic() < deadline
            with suppress(OSError):
                answer = asked(address)


def test_ipv6() -> None:
    with serving(host="::1") as address:
        assert asked(address).endswith(b"hello")
