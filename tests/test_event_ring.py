"""Events in memory that a rank and its supervisor share."""

from __future__ import annotations

import os
import random

from phalanx.event_ring import BYTES, HEADER_BYTES, PUT, RING_BYTES, EventRing


def taken(ring: EventRing) -> list[bytes]:
    found = []
    for piece, until in ring.pieces():
        found.append(piece)
        ring.take(until)
    return found


def test_what_is_put_is_taken_in_order_over_and_over() -> None:
    memory, draw = memoryview(bytearray(BYTES)), random.Random(0)
    rank, supervisor = EventRing(memory), EventRing(memory)
    put, found = [], []
    for _ in range(3000):
        piece = draw.randbytes(draw.choice([1, 2, 100, 3000]))
        while not rank.put(piece):
            found += taken(supervisor)
            assert rank.empty
        put.append(piece)
    found += taken(supervisor)
    assert found == put
    assert rank.header[PUT] > 5 * RING_BYTES


def test_one_that_does_not_fit_is_refused_and_the_next_is_put() -> None:
    ring = EventRing(memoryview(bytearray(BYTES)))
    assert not ring.put(bytes(RING_BYTES))
    assert ring.empty
    assert ring.put(b"small")
    assert taken(ring) == [b"small"]


def test_a_piece_that_is_not_all_there_waits() -> None:
    memory = memoryview(bytearray(BYTES))
    ring = EventRing(memory)
    ring.put(b"first")
    ring.put(b"second")
    at = HEADER_BYTES + 8 + 5 + 8
    whole, memory[at : at + 6] = bytes(memory[at : at + 6]), os.urandom(6)
    assert taken(ring) == [b"first"]
    memory[at : at + 6] = whole
    assert taken(ring) == [b"second"]


def test_a_count_that_is_seen_before_the_bytes_gives_nothing() -> None:
    ring = EventRing(memoryview(bytearray(BYTES)))
    ring.header[PUT] = 100
    assert taken(ring) == []
