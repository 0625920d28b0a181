"""What a checkpoint says of itself: read back as written, or refused with the file and the reason."""

from __future__ import annotations

import zlib

import pytest

from phalanx.checkpoint.manifest import Chunk, Damaged, Held, Manifest
from phalanx.parallel.boxes import Box


def part(first: int, rows: int, rank: int = 0, **facts: object) -> Manifest:
    chunk = Chunk("model/w", Box((first, 0), (rows, 2)), f"part-{rank}", 0, 8 * rows, 123)
    held = Held("float32", (5, 2), 10 + rank, [chunk])
    return Manifest({"step": 3, "rank": rank, **facts}, {"model/w": held}, {f"counters/n/{rank}": rank})


def test_it_is_read_back_as_it_was_written() -> None:
    manifest = part(0, 5)
    assert Manifest.parse(manifest.to_json(), "here") == manifest
    assert manifest.step == 3
    assert manifest.size == 40


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    content = part(0, 5).to_json()
    for place in range(8 * len(content)):
        spoiled = bytearray(content)
        spoiled[place // 8] ^= 1 << place % 8
        with pytest.raises(Damaged, match="here/manifest has changed"):
            Manifest.parse(bytes(spoiled), "here/manifest")
    for length in range(len(content) - 1):  # the last line's end is no content
        with pytest.raises(Damaged, match="here/manifest has changed since it was written, or was cut short"):
            Manifest.parse(content[:length], "here/manifest")


def test_another_format_is_refused() -> None:
    text = part(0, 5).to_json().decode().splitlines()[0].replace('"format": 1', '"format": 2')
    with pytest.raises(Damaged, match="has format 2, and this version of Phalanx reads 1"):
        Manifest.parse(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode(), "here")


def test_parts_make_a_whole() -> None:
    """Each stage knows what an optimizer changed for its own weights alone."""
    whole = Manifest.merged([part(0, 3, 0, options={"w": {"k": 1}}), part(3, 2, 1, options={"v": {"k": 2}})])
    assert whole.tensors["model/w"].hash == 21
    assert len(whole.tensors["model/w"].chunks) == 2
    assert whole.numbers == {"counters/n/0": 0, "counters/n/1": 1}
    assert whole.facts["options"] == {"w": {"k": 1}, "v": {"k": 2}}
    for parts, found in (([part(0, 3)], 6), ([part(0, 3), part(2, 3, 1)], 12)):
        with pytest.raises(AssertionError, match=f"model/w: {found} of 10 elements"):
            Manifest.merged(parts)


def test_a_hash_is_of_what_begins_so() -> None:
    first, second = part(0, 5), part(0, 5)
    second.tensors["optimizer/m/w"] = Held("float32", (5, 2), 1)
    assert first.hash() == second.hash()
    assert first.hash("") != second.hash("")


def test_a_chunk_is_checked() -> None:
    chunk = Chunk("model/w", Box((0,), (2,)), "part", 100, 4, zlib.crc32(b"abcd"))
    assert chunk.checked(b"abcd", "here/part") == b"abcd"
    with pytest.raises(Damaged, match="here/part is cut short: model/w has 3 of 4 bytes there"):
        chunk.checked(b"abc", "here/part")
    with pytest.raises(Damaged, match="here/part has changed since it was written: bytes 100 to 104 of model/w"):
        chunk.checked(b"abcf", "here/part")
