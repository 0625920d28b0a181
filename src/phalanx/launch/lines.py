"""Messages between supervisors: one JSON object a line over TCP, through sockets that no forked child keeps.

A connection that breaks is how hosts learn at once that a process died. A rank forked from that process would hold the
connection too, and keep it from breaking; it would also keep the port. So each socket is closed in every child right
after the fork, without anybody's doing. And sockets are waited for with ``poll``: an ``epoll`` would be shared as well.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

LONGEST = 1 << 24
"""Bytes without an end of line that are taken for a stranger's."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_for_children(sock: socket.socket) -> socket.socket:
    """Close this socket in every process forked from now on."""
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()  # only this process's hold on it: the parent's connection stays


os.register_at_fork(after_in_child=_close_in_child)


class Line:
    """A connection that neither waits nor raises: what cannot be sent yet is kept, and a break is a fact to look up."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = not_for_children(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = time.monotonic()
        """When something last came, by this process's clock."""
        self.broken = False
        self.strange = False
        """What came is no message of ours."""
        self.unsent = b""
        self._unread = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, **message: Any) -> None:
        self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent = b""  # not broken yet: what the other said before it left may still be there to read

    def receive(self) -> list[dict[str, Any]]:
        """Everything that has come; also what was said just before a break."""
        try:
            while not self.broken:
                some = self.sock.recv(1 << 16)
                self._unread += some
                self.heard = time.monotonic()
                self.broken = not some or len(self._unread) > LONGEST
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        *whole, self._unread = self._unread.split(b"\n")
        try:
            messages = [json.loads(line) for line in whole]
        except ValueError:
            messages = [None]
        if all(isinstance(message, dict) for message in messages):
            return messages
        self.broken = self.strange = True
        return []

    def close(self, patience: float = 0.0) -> None:
        """Hang up. With patience: after the other side, since what it has not read yet could be lost otherwise."""
        deadline = time.monotonic() + patience
        while self.unsent and not self.broken and time.monotonic() < deadline:
            ready([self], deadline - time.monotonic())
            self.flush()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        while not self.broken and time.monotonic() < deadline:
            ready([self], deadline - time.monotonic())
            self.receive()
        self.sock.close()


def ready(things: Iterable[socket.socket | Line], seconds: float) -> set[int]:
    """The file numbers of those that can be read, or written if they have something unsent."""
    poll = select.poll()
    for thing in things:
        writes = isinstance(thing, Line) and bool(thing.unsent)
        poll.register(thing.fileno(), select.POLLIN | (select.POLLOUT if writes else 0))
    return {number for number, _ in poll.poll(max(0.0, seconds) * 1000)}
