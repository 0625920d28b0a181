"""Events on their way from a rank to its supervisor: a ring of bytes in memory that both share and that outlives both.

One puts, one takes. What is put is there for whoever takes also when the rank that put it was killed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

HEADER_BYTES = 64
PUT, TAKEN, PAUSE, IS_SHARED = range(4)
"""Of the header, as whole numbers: bytes that were put, and taken, since ever; what `EventAppender` is to be told."""
RING_BYTES = 1 << 18
BYTES = HEADER_BYTES + RING_BYTES
FRAME = struct.Struct("<II")
"""Before each piece: its length, and a checksum: memory may show the count of bytes before the bytes."""


class EventRing:
    """Of one rank. ``memory``: `BYTES`, zeros at first."""

    def __init__(self, memory: memoryview) -> None:
        self._ring = memory[HEADER_BYTES:BYTES]
        self.header = memory[:HEADER_BYTES].cast("q")

    @property
    def empty(self) -> bool:
        """Whether all that was put has been taken, and what became of it is settled."""
        return self.header[PUT] == self.header[TAKEN]

    def put(self, piece: bytes) -> bool:
        """Whether there was room for it."""
        header = self.header
        put, size = header[PUT], FRAME.size + len(piece)
        if put + size - header[TAKEN] > RING_BYTES:
            return False
        framed, at = FRAME.pack(len(piece), zlib.crc32(piece)) + piece, put % RING_BYTES
        if at + size <= RING_BYTES:
            self._ring[at : at + size] = framed
        else:
            first = RING_BYTES - at
            self._ring[at:], self._ring[: size - first] = framed[:first], framed[first:]
        header[PUT] = put + size
        return True

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """What waits, in order; each with what to tell `take` when it is dealt with."""
        at = self.header[TAKEN]
        while at < self.header[PUT]:
            length, checksum = FRAME.unpack(self._read(at, FRAME.size))
            piece = self._read(at + FRAME.size, length) if length <= RING_BYTES else b""
            if not length or zlib.crc32(piece) != checksum:
                return  # it is not all there yet
            at += FRAME.size + length
            yield piece, at

    def take(self, until: int) -> None:
        """Up to there all is dealt with, and its room is free."""
        self.header[TAKEN] = until

    def _read(self, at: int, size: int) -> bytes:
        at %= RING_BYTES
        return bytes(self._ring[at : at + size]) + bytes(self._ring[: max(0, at + size - RING_BYTES)])
