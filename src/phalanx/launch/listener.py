"""A socket that listens for those who know the run's key, and bears with everybody else.

A connection has a moment to prove itself, and few may be at it at a time; what they hold until then is a few bytes and
a file descriptor each. Strangers are noted in one line now and then, and learn nothing.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import suppress

from phalanx.launch.key import Key
from phalanx.launch.lines import LARGEST, Line, not_for_children

PROVE_SECONDS = 3.0
"""How long a connection has to prove itself,"""
CROWDED_SECONDS = 0.25
"""and how long at least, while more are waiting than may try at a time."""
UNPROVEN = 256
"""How many may try at a time."""
NOTE_SECONDS = 10.0
"""Strangers are noted at most this often."""
BREATH = 0.1
"""Seconds without accepting, when this process is out of file descriptors."""


class ConnectionListener:
    """Accepts; `admitted` gives those that have proven themselves."""

    def __init__(self, sock: socket.socket, key: Key, purpose: str, expected: int = 0, largest: int = LARGEST) -> None:
        """``expected``: so many connections at a time."""
        self.sock = not_for_children(sock)
        sock.setblocking(False)
        self._key, self._purpose, self._largest = key, purpose, largest
        self._unproven: dict[Line, float] = {}
        """Since when each has been trying."""
        self._full_until = 0.0
        self._strangers, self._last, self._noted = 0, "", -NOTE_SECONDS
        descriptors = _descriptors(4 * expected + 512)
        self.most_unproven = max(8, min(UNPROVEN, descriptors // 8))
        self.most = descriptors // 2
        """How many connections this process can bear at all."""

    def waited_for(self) -> list[socket.socket | Line]:
        """What to `ready` on."""
        now = time.monotonic()
        crowded = len(self._unproven) >= self.most_unproven and not self._tired(now)
        open_ = now >= self._full_until and not crowded
        return [*self._unproven, *([self.sock] if open_ else [])]

    def admitted(self, found: set[int], connections: int) -> list[Line]:
        """Those that have proven themselves now, of what was ``found`` ready; so many are there already."""
        now = time.monotonic()
        through: list[Line] = []
        for line in list(self._unproven):
            if line.fileno() in found:
                line.flush()
                line.receive()
            if line.proven and connections + len(through) < self.most:
                del self._unproven[line]
                through.append(line)
            elif line.broken or line.proven or now - self._unproven[line] > PROVE_SECONDS:
                self._drop(line)
        if self.sock.fileno() in found:
            self._accept(now)
        self._note(now)
        return through

    def close(self) -> None:
        for line in list(self._unproven):
            del self._unproven[line]
            line.close()
        self.sock.close()

    def _tired(self, now: float) -> list[Line]:
        return [line for line, since in self._unproven.items() if now - since > CROWDED_SECONDS]

    def _accept(self, now: float) -> None:
        tired = self._tired(now)
        for _ in range(self.most_unproven):
            if len(self._unproven) >= self.most_unproven:
                if not tired:
                    return
                self._drop(tired.pop(0))
            try:
                line = Line(self.sock.accept()[0], self._key, self._purpose, accepted=True, largest=self._largest)
            except BlockingIOError:
                return
            except OSError as error:  # one that left while it stood in the queue, or out of file descriptors
                if not isinstance(error, ConnectionError):
                    self._full_until = now + BREATH
                    for other in list(self._unproven)[: self.most_unproven // 2]:
                        self._drop(other)
                return
            self._unproven[line] = now

    def _drop(self, line: Line) -> None:
        with suppress(OSError):
            self._last = line.sock.getpeername()[0]
        del self._unproven[line]
        line.close()
        self._strangers += 1

    def _note(self, now: float) -> None:
        """In one piece and without a lock, which a rank that is forked meanwhile would find taken for ever."""
        if not self._strangers or now - self._noted < NOTE_SECONDS:
            return
        several = "1 connection was" if self._strangers == 1 else f"{self._strangers} connections were"
        origin = f", the last from {self._last}" if self._last else ""
        note(f"{several} closed without proof of the run's key{origin}")
        self._strangers, self._noted = 0, now


def note(words: str) -> None:
    """One line for people, from a thread."""
    with suppress(OSError):
        os.write(2, f"   note  {words}\n".encode(errors="replace"))


def _descriptors(wanted: int) -> int:
    """How many this process may have; asks the system for as many as wanted, if it has fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft
