"""One page over HTTP from a rank that trains, by a thread with hard limits: whoever asks, saving is not in their way.

A rank has a process's file descriptors and one interpreter. So this takes a few connections at a time, each for a
moment, and looks at them a few times a second: who asks more than that waits, or is not answered.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from phalanx.errors import CannotHere

TAKEN_SECONDS = 5.0
"""How long a port may be held by a rank that was killed."""
MOST_CONNECTIONS = 8
ASKED_SECONDS = 2.0
"""How long a connection has for its request and for taking the answer,"""
CROWDED_SECONDS = 0.25
"""and how long at least, where others wait."""
LARGEST_REQUEST = 1 << 13
ROUND_SECONDS = 0.05
"""Between two looks at connections."""
KIND = "text/plain; version=0.0.4; charset=utf-8"
PATHS = ("/metrics", "/")


@dataclass
class _Request:
    """A connection."""

    since: float
    request: bytes = b""
    answer: memoryview | None = None
    """What is left to be sent."""


class MetricsServer:
    """Listens from the moment it is made until `close`."""

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        """``text``: the page, as it is now."""
        self._text, self._over = text, threading.Event()
        self._listening = _listen(host, port)
        self._open: dict[socket.socket, _Request] = {}
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listening:
            selector.register(self._listening, selectors.EVENT_READ)
            while not self._over.is_set():
                ready = {key.fileobj for key, _ in selector.select(4 * ROUND_SECONDS)}
                if self._listening in ready:
                    self._accept(selector)
                for connection, asked in list(self._open.items()):
                    if connection in ready and not self._go_on(connection, asked, selector):
                        self._drop(connection, selector)
                late = time.monotonic() - ASKED_SECONDS
                for connection in [each for each, asked in self._open.items() if asked.since < late]:
                    self._drop(connection, selector)
                self._over.wait(ROUND_SECONDS)
            for connection in list(self._open):
                self._drop(connection, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """As many as there is room for; the oldest leave, where they have had their moment."""
        tired = time.monotonic() - CROWDED_SECONDS
        for _ in range(MOST_CONNECTIONS):
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = min(self._open, key=lambda each: self._open[each].since)
                if self._open[oldest].since > tired:
                    return
                self._drop(oldest, selector)
            try:
                connection = self._listening.accept()[0]
            except OSError:  # nobody is there any more, or this process has no descriptor left
                return
            connection.setblocking(False)
            self._open[connection] = _Request(time.monotonic())
            selector.register(connection, selectors.EVENT_READ)

    def _go_on(self, connection: socket.socket, asked: _Request, selector: selectors.BaseSelector) -> bool:
        """Read or write what can be; whether there is more to come."""
        try:
            if asked.answer is None:
                part = connection.recv(LARGEST_REQUEST)
                asked.request += part
                if not part or len(asked.request) > LARGEST_REQUEST:
                    return False
                if b"\r\n\r\n" not in asked.request and b"\n\n" not in asked.request:
                    return True
                asked.answer = memoryview(_answer(asked.request, self._text))
                selector.modify(connection, selectors.EVENT_WRITE)
            asked.answer = asked.answer[connection.send(asked.answer) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return len(asked.answer) > 0

    def _drop(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        del self._open[connection]
        selector.unregister(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        connection.close()


def _answer(request: bytes, text: Callable[[], str]) -> bytes:
    """To GET and HEAD of one path."""
    method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, body = "405 Method Not Allowed", "GET and HEAD alone.\n"
    elif path not in PATHS:
        status, body = "404 Not Found", "Look at /metrics.\n"
    else:
        status, body = "200 OK", text()
    content = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {KIND}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if method == "HEAD" else content)


def _listen(host: str, port: int) -> socket.socket:
    """A socket at this address; one that is taken is refused, if it stays so."""
    deadline = time.monotonic() + TAKEN_SECONDS
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(place, family=family, backlog=2 * MOST_CONNECTIONS)
            listening.setblocking(False)
            return listening
        except OSError as error:
            if time.monotonic() > deadline or error.errno != errno.EADDRINUSE:
                raise CannotHere(
                    f"{host}:{port} cannot be listened at for Prometheus: {error.strerror or error}. Choose another "
                    "--metrics-port, or end what holds it."
                ) from None
            time.sleep(0.2)
