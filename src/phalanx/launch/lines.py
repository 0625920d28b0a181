"""Messages over TCP between those who know the run's key, through sockets that no forked child keeps.

Before anything is read or told, both ends prove that they know it. Then a message is its length, a MAC and its bytes.
The MAC is over the message's number and hash, under a key of this session and direction: nothing can be put in, left
out, repeated or sent back. What does not fit breaks the connection.

A connection that breaks is how hosts learn at once that a process died. A rank forked from that process would hold the
connection too, and keep it from breaking; it would also keep the port. So each socket is closed in every child right
after the fork, without anybody's doing. And sockets are waited for with ``poll``: an ``epoll`` would be shared as well.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from phalanx.launch.key import NONCE_BYTES, PROOF_BYTES, Key

MAGIC = b"phalanx2"
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
LARGEST = 1 << 22
"""Bytes of a message; a larger one is no message of ours."""
UNSENT = 1 << 25
"""Bytes that the other end may leave unread."""
AT_ONCE = 1 << 20
"""Bytes read from one connection before it is another's turn."""
MAC_BYTES = 16
_HEAD = struct.Struct(f">I{MAC_BYTES}s")
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_for_children(sock: socket.socket) -> socket.socket:
    """Close this socket in every process forked from now on."""
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()  # only this process's hold on it: the parent's connection stays


os.register_at_fork(after_in_child=_close_in_child)


class Packed(NamedTuple):
    """A message that may go to many: what is the same for all of them is done once."""

    payload: bytes
    digest: bytes


def packed(payload: bytes) -> Packed:
    return Packed(payload, hashlib.sha256(payload).digest())


class Line:
    """A connection that neither waits nor raises: what cannot be sent yet is kept, and a break is a fact to look up."""

    def __init__(
        self, sock: socket.socket, key: Key, purpose: str, *, accepted: bool = False, largest: int = LARGEST
    ) -> None:
        """``purpose``: what the connection is for, which both ends must mean. ``accepted``: by this end."""
        self.sock = not_for_children(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = time.monotonic()
        """When something last came, by this process's clock."""
        self.proven = False
        """The other end knows the key. Nothing is sent or given out before."""
        self.broken = False
        self.strange = False
        """What came is no message of ours."""
        self.tried = False
        """This end has shown its proof; a break before the other's means that it was not taken."""
        self.unsent = bytearray()
        self._unread = bytearray()
        self._key, self._purpose, self._accepted, self._largest = key, purpose, accepted, largest
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._keys = (b"", b"")
        """Of what is sent, and of what is received."""
        self._sent = self._received = 0
        if accepted:
            self.unsent += MAGIC + self._nonce
            self.flush()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: bytes | Packed) -> None:
        assert self.proven
        if isinstance(message, bytes):
            message = packed(message)
        mac = _mac(self._keys[0], self._sent, message.digest)
        self._sent += 1
        self.unsent += _HEAD.pack(len(message.payload), mac)
        self.unsent += message.payload
        self.flush()
        self.broken = self.broken or len(self.unsent) > UNSENT

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # not broken yet: what the other said before it left may still be there to read

    def receive(self) -> list[bytes]:
        """What has come; also what was said just before a break."""
        before = self.proven
        try:
            for _ in range(AT_ONCE >> 16):
                if self.broken or self.proven != before:  # its first message is for whoever it is handed to
                    break
                some = self.sock.recv(self._wanted())
                self._unread += some
                self.broken = not some
                if some:
                    self.heard = time.monotonic()
                    self._prove()
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        return self._messages() if self.proven else []

    def _wanted(self) -> int:
        if self.proven:
            return 1 << 16
        whole = CHALLENGE_BYTES if not self._accepted and not self.tried else CHALLENGE_BYTES + PROOF_BYTES
        return whole - len(self._unread)

    def _prove(self) -> None:
        """Do what can be done of the proof."""
        if self.proven:
            return
        if not MAGIC.startswith(self._unread[: len(MAGIC)]):
            self._refuse()
            return
        if not self._accepted and not self.tried and len(self._unread) >= CHALLENGE_BYTES:
            self._nonces = bytes(self._unread[len(MAGIC) : CHALLENGE_BYTES]) + self._nonce
            self.unsent += MAGIC + self._nonce + self._key.derive("client", self._purpose, self._nonces)
            self.tried = True
            self.flush()
        if len(self._unread) < CHALLENGE_BYTES + PROOF_BYTES:
            return
        proof = bytes(self._unread[CHALLENGE_BYTES : CHALLENGE_BYTES + PROOF_BYTES])
        if self._accepted:
            self._nonces = self._nonce + bytes(self._unread[len(MAGIC) : CHALLENGE_BYTES])
        other = "client" if self._accepted else "server"
        if not hmac.compare_digest(proof, self._key.derive(other, self._purpose, self._nonces)):
            self._refuse()
            return
        del self._unread[: CHALLENGE_BYTES + PROOF_BYTES]
        ways = [self._key.derive(f"{way} messages", self._purpose, self._nonces) for way in ("server", "client")]
        self._keys = (ways[0], ways[1]) if self._accepted else (ways[1], ways[0])
        if self._accepted:
            self.unsent += self._key.derive("server", self._purpose, self._nonces)
            self.flush()
        self.proven = True

    def _refuse(self) -> None:
        self.broken = self.strange = True
        self._unread.clear()

    def _messages(self) -> list[bytes]:
        found: list[bytes] = []
        at = 0
        while len(self._unread) - at >= _HEAD.size:
            size, mac = _HEAD.unpack_from(self._unread, at)
            if size > self._largest:
                self._refuse()
                return found
            if len(self._unread) - at - _HEAD.size < size:
                break
            payload = bytes(self._unread[at + _HEAD.size : at + _HEAD.size + size])
            right = _mac(self._keys[1], self._received, hashlib.sha256(payload).digest())
            if not hmac.compare_digest(mac, right):
                self._refuse()
                return found
            self._received += 1
            at += _HEAD.size + size
            found.append(payload)
        del self._unread[:at]
        return found

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


def _mac(key: bytes, number: int, digest: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + digest, "sha256")[:MAC_BYTES]


def ready(things: Iterable[socket.socket | Line], seconds: float) -> set[int]:
    """The file numbers of those that can be read, or written if they have something unsent."""
    poll = select.poll()
    for thing in things:
        writes = isinstance(thing, Line) and bool(thing.unsent)
        poll.register(thing.fileno(), select.POLLIN | (select.POLLOUT if writes else 0))
    return {number for number, _ in poll.poll(max(0.0, seconds) * 1000)}
