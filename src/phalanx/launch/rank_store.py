"""The store where ranks leave their addresses for each other, open to those who know the key.

torch's own (``TCPStore``) asks nobody who they are, and whoever writes into it leads ranks where they like. This one is
a ``torch.distributed.Store`` whose requests travel over authenticated connections to a thread of the first host's
supervisor. A request is an operation and its arguments, all of bounded size; one after another a connection.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from phalanx.launch.key import Key
from phalanx.launch.lines import Line, ready
from phalanx.launch.listener import ConnectionListener, note

LARGEST = 1 << 24
MOST_PARTS = 1 << 16
TICK = 0.1
MARGIN = 5.0
"""Seconds beyond a request's own time, in which the store should have said that it is up."""
DONE, LATE = b"done", b"late"
_SIZE = struct.Struct(">I")


class Garbled(ValueError):
    """Not a request of ours."""


def purpose(port: int) -> str:
    """A store's connections are for it alone."""
    return f"store at port {port}"


def join(parts: Sequence[bytes]) -> bytes:
    return b"".join(piece for part in parts for piece in (_SIZE.pack(len(part)), part))


def split(payload: bytes) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    while at < len(payload):
        if len(payload) - at < _SIZE.size or len(parts) == MOST_PARTS:
            raise Garbled("it is cut, or has too many parts")
        end = at + _SIZE.size + _SIZE.unpack_from(payload, at)[0]
        if end > len(payload):
            raise Garbled("it is cut")
        parts.append(payload[at + _SIZE.size : end])
        at = end
    return parts


@dataclass(eq=False)
class _Waiter:
    """A request that is answered once all its keys are there."""

    line: Line
    keys: list[bytes]
    deadline: float
    values: bool
    """Whether it asks for them, or only whether they are there."""


class StoreServer:
    """Serves a store at a socket that already listens, in a thread, until it is closed."""

    def __init__(self, sock: socket.socket, key: Key, ranks: int) -> None:
        self._listener = ConnectionListener(sock, key, purpose(sock.getsockname()[1]), expected=ranks, largest=LARGEST)
        self._lines: list[Line] = []
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[_Waiter]] = {}
        """By the first key that each of them misses; also some that have given up."""
        self._waiters: set[_Waiter] = set()
        self._closing = False
        self.thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._closing = True
        self.thread.join()

    def _serve(self) -> None:
        while not self._closing:
            found = ready([*self._listener.waited_for(), *self._lines], TICK)
            for line in self._lines:
                if line.fileno() in found:
                    self._listen(line)
            self._lines += self._listener.admitted(found, len(self._lines))
            now = time.monotonic()
            for waiter in [w for w in self._waiters if w.deadline < now or w.line.broken]:
                self._waiters.discard(waiter)
                if not waiter.line.broken:
                    waiter.line.send(join([LATE]))
            for line in [line for line in self._lines if line.broken]:
                self._lines.remove(line)
                line.close()
        for line in self._lines:
            line.close()
        self._listener.close()

    def _listen(self, line: Line) -> None:
        line.flush()
        for payload in line.receive():
            try:
                answer = self._answer(line, split(payload))
            except (ValueError, OverflowError) as reason:  # also of a number that is none, or too large
                note(f"a rank's connection to the store was closed, for what it sent: {reason}")
                line.broken = True
                return
            if answer is not None:
                line.send(join([DONE, *answer]))

    def _answer(self, line: Line, parts: list[bytes]) -> list[bytes] | None:
        """What to answer now; None: later."""
        match parts:
            case [b"get" | b"wait" as what, milliseconds, *keys]:
                deadline = time.monotonic() + int(milliseconds) / 1000
                return self._wait(_Waiter(line, keys, deadline, what == b"get"))
            case [b"set", *pairs] if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._put(key, value)
                return []
            case [b"add", key, amount]:
                total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
                self._put(key, total)
                return [total]
            case [b"append", key, value]:
                self._put(key, self._values.get(key, b"") + value)
                return []
            case [b"compare", key, expected, wanted]:
                if self._values.get(key, b"") == expected:
                    self._put(key, wanted)
                return [self._values.get(key, expected)]
            case [b"delete", key]:
                return [b"0" if self._values.pop(key, None) is None else b"1"]
            case [b"check", *keys]:
                return [b"1" if all(key in self._values for key in keys) else b"0"]
            case [b"count"]:
                return [str(len(self._values)).encode()]
        raise Garbled("it is no operation of a store")

    def _put(self, key: bytes, value: bytes) -> None:
        if len(value) > LARGEST // 2:
            raise Garbled("a value is too large")
        self._values[key] = value
        for waiter in self._waiting.pop(key, []):
            if waiter in self._waiters:
                answer = self._wait(waiter)
                if answer is not None:
                    self._waiters.discard(waiter)
                    waiter.line.send(join([DONE, *answer]))

    def _wait(self, waiter: _Waiter) -> list[bytes] | None:
        """The answer if all is there; otherwise it is looked at again when one more key is."""
        missing = next((key for key in waiter.keys if key not in self._values), None)
        if missing is None:
            return [self._values[key] for key in waiter.keys] if waiter.values else []
        self._waiters.add(waiter)
        self._waiting.setdefault(missing, []).append(waiter)
        return None


class RankStore(dist.Store):
    """A rank's end of it. One request at a time: who comes meanwhile, from another thread, waits."""

    def __init__(self, address: str, port: int, key: Key, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout.total_seconds()
        self._line = Line(_connected(address, port, deadline), key, purpose(port), largest=LARGEST)
        while not self._line.proven:
            ready([self._line], deadline - time.monotonic())
            self._line.receive()
            if self._line.broken or time.monotonic() > deadline:
                self._line.close()
                why = "did not take this rank's key" if self._line.broken else "Timed out waiting: it does not answer"
                raise dist.DistNetworkError(f"the ranks' store at {address}:{port}: {why}")

    def close(self) -> None:
        self._line.close()

    def _ask(self, *parts: bytes, seconds: float | None = None) -> list[bytes]:
        seconds = self._timeout.total_seconds() if seconds is None else seconds
        deadline = time.monotonic() + seconds + MARGIN
        line = self._line
        with self._lock:
            line.send(join(parts))
            while not (found := line.receive()):
                if line.broken:
                    raise dist.DistNetworkError("Connection closed by peer: the ranks' store is gone")
                if time.monotonic() > deadline:
                    line.broken = True  # its answer could come yet, and be taken for the next one's
                    raise dist.DistStoreError(f"Timed out waiting for the ranks' store for {seconds:g} s")
                ready([line], deadline - time.monotonic())
                line.flush()
        status, *values = split(found[0])
        if status != DONE:
            names = ", ".join(part.decode(errors="replace") for part in parts[2:6])
            raise dist.DistStoreError(f"Timed out waiting for keys of the ranks' store for {seconds:g} s: {names}")
        return values

    def _wait(self, what: bytes, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        return self._ask(what, b"%d" % (1000 * seconds), *(key.encode() for key in keys), seconds=seconds)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._wait(b"get", [key], None)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(b"wait", keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key.encode(), b"%d" % amount)[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", key.encode(), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *(key.encode() for key in keys)) == [b"1"]

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        return self._ask(b"compare", key.encode(), _bytes(expected), _bytes(wanted))[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(b"get", keys, None)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(part for key, value in pairs for part in (key.encode(), _bytes(value))))

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def clone(self) -> RankStore:
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # what torch calls them from its own side


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _connected(address: str, port: int, deadline: float) -> socket.socket:
    """The store's host may be a moment behind."""
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(
                    f"Timed out waiting for the ranks' store at {address}:{port}: {error}"
                ) from None
            time.sleep(0.05)
