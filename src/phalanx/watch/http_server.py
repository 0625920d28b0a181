"""An HTTP server that strangers cannot hold: limits of connections, and of the time that each request takes to come.

A connection that sends its request byte by byte, or sends none, is closed after `HEAD_SECONDS`, however often something
comes. Where there are as many connections as may be, the one that has waited longest for a request gives way to a new
one.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_CONNECTIONS = 128
"""At a time: a browser has six."""
HEAD_SECONDS = 10.0
"""In which a request must have come whole, since its connection was made or its last answer was sent."""
HEAD_BYTES = 1 << 17
"""Of a request's line and headers."""
ANSWER_SECONDS = 30.0
"""In which an answer must have been taken."""


class BoundedServer(ThreadingHTTPServer):
    """Serves each connection in a thread; ``handler`` makes `BoundedHandler` objects."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Callable[..., BoundedHandler]) -> None:
        """Listen at a host, by name or IPv4 or IPv6 address, and a port; OSError where that cannot be."""
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._waiting: dict[socket.socket, None] = {}
        """Connections of which a request has yet to come, the longest first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection, or close it where there are too many that are being answered."""
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                longest = next(iter(self._waiting), None)
                if longest is None:
                    self.shutdown_request(request)
                    return
                self._forget(longest)
                with suppress(OSError):
                    longest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._open.add(request)
            self._waiting[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._closed(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed(request)

    def waits(self, request: socket.socket) -> None:
        """Note that a connection waits for its next request."""
        with self._lock:
            if request in self._open:
                self._waiting[request] = None

    def answers(self, request: socket.socket) -> None:
        """Note that a connection's request has come whole."""
        with self._lock:
            self._waiting.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a connection that breaks, or a stranger's nonsense, is not worth a traceback."""

    def _closed(self, request: socket.socket) -> None:
        with self._lock:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self._open.discard(request)
        self._waiting.pop(request, None)


class BoundedHandler(BaseHTTPRequestHandler):
    """A request handler that gives up on requests and answers that take too long."""

    server: BoundedServer

    def setup(self) -> None:
        """Read the connection with a limit of time and size for each request."""
        super().setup()
        self._head = _Head(self.connection)
        self.rfile.close()
        self.rfile = io.BufferedReader(self._head)

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self.server.waits(self.connection)
        self._head.begin()
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the headers; whether there is a request to answer."""
        whole = super().parse_request()
        self.server.answers(self.connection)
        self.connection.settimeout(ANSWER_SECONDS)
        return whole

    def handle(self) -> None:
        """Serve the requests of one connection, until either end closes it."""
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def log_message(self, format: str, *words: Any) -> None:
        """Print no line for each request."""


class _Head(io.RawIOBase):
    """What a connection sends, up to a moment and to a size."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """A new request is waited for."""
        self._until, self._room = time.monotonic() + HEAD_SECONDS, HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("its request took too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(memoryview(into)[: self._room])
        self._room -= count
        return count
