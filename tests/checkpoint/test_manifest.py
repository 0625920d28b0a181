"""What a checkpoint says of itself: read back as written, or refused with the file and the reason."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.checkpoint.manifest import Chunk, Damaged, Held, Manifest, covered_once
from phalanx.parallel.weights.boxes import Box


def part(first: int, rows: int, rank: int = 0, **facts: object) -> Manifest:
    chunk = Chunk("model/w", Box((first, 0), (rows, 2)), f"part-{rank:05d}.safetensors", 0, 8 * rows, 123)
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


def test_it_is_json_whatever_a_run_keeps() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    manifest = part(0, 5, guard_like=[math.inf, -math.inf, 1.0], options={"w": {"limit": (math.inf,)}})
    for content in (part(0, 5).to_json(), manifest.to_json()):
        assert json.loads(content, parse_constant=refuse)["facts"]["step"] == 3
    read = Manifest.parse(manifest.to_json(), "here").facts
    assert read["guard_like"] == [math.inf, -math.inf, 1.0]
    assert read["options"] == {"w": {"limit": [math.inf]}}
    (nan,) = Manifest.parse(part(0, 5, losses=[math.nan]).to_json(), "here").facts["losses"]
    assert math.isnan(nan)


def test_what_older_versions_wrote_is_read() -> None:
    content = json.loads(part(0, 5).to_json())
    del content["crc32"]
    text = json.dumps(content)
    older = f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()
    assert Manifest.parse(older, "here") == part(0, 5)
    for place in range(len(older) - 1):
        with pytest.raises(Damaged, match="here has changed"):
            Manifest.parse(older[:place] + bytes([older[place] ^ 1]) + older[place + 1 :], "here")


def test_another_format_is_refused() -> None:
    text = part(0, 5).to_json().decode().splitlines()[0].replace('"format":1', '"format":4')
    with pytest.raises(Damaged, match="has format 4, and this version of Phalanx reads 1 to 3"):
        Manifest.parse(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode(), "here")


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


# Whoever can write a file can write its checksum: what it says is not believed.


def forged(change: Callable[[dict[str, Any]], Any]) -> bytes:
    found = json.loads(part(0, 5).to_json().decode().splitlines()[0])
    text = change(found) or json.dumps(found)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()


def in_chunk(**changed: Any) -> Callable[[dict[str, Any]], None]:
    places = {"offsets": 0, "sizes": 1, "file": 2, "start": 3, "length": 4}

    def change(found: dict[str, Any]) -> None:
        for name, value in changed.items():
            found["tensors"]["model/w"]["chunks"][0][places[name]] = value

    return change


def in_tensor(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["tensors"]["model/w"].update(changed)


FORGED = {
    "a file elsewhere": in_chunk(file="../../secret"),
    "an absolute path": in_chunk(file="/etc/passwd"),
    "another kind of file": in_chunk(file="manifest.json"),
    "no text for a name": in_chunk(file=7),
    "negative offsets": in_chunk(offsets=[-1, 0]),
    "offsets beyond": in_chunk(offsets=[1, 0]),
    "offsets that are no numbers": in_chunk(offsets=["0", 0]),
    "other dims": in_chunk(offsets=[0], sizes=[5]),
    "empty sizes": in_chunk(sizes=[0, 2], length=0),
    "another length": in_chunk(length=4),
    "a negative start": in_chunk(start=-8),
    "an absurd start": in_chunk(start=1 << 70),
    "no chunks": in_tensor(chunks=[]),
    "a chunk twice": lambda found: found["tensors"]["model/w"]["chunks"].append(
        found["tensors"]["model/w"]["chunks"][0]
    ),
    "chunks that are none": in_tensor(chunks=[7]),
    "a dtype of ours": in_tensor(dtype="save"),
    "a dtype that is none": in_tensor(dtype=["float32"]),
    "an absurd shape": in_tensor(shape=[1 << 40, 1 << 40]),
    "a negative shape": in_tensor(shape=[-5, -2]),
    "a hash that is none": in_tensor(hash="?"),
    "no tensors": lambda found: found.pop("tensors") and None,
    "tensors in a list": lambda found: found.update(tensors=[1]),
    "no step": lambda found: found["facts"].pop("step") and None,
    "a step that is none": lambda found: found["facts"].update(step="3"),
    "facts that are none": lambda found: found.update(facts=7),
    "numbers that are none": lambda found: found.update(numbers=7),
    "a number that is none": lambda found: found.update(numbers={"counters/n/w": {"a": 1}}),
    "a negative hash": in_tensor(hash="-1"),
    "a hash that is too long": in_tensor(hash=17 * "1"),
    "a tensor of no site": lambda found: found["tensors"].update({"sites/x/y": found["tensors"]["model/w"]}),
    "a number of no site": lambda found: found.update(numbers={"sites/": 1}),
    "parts in a list": lambda found: found.update(format=3, children=["part-00000.json"]),
    "parts without hashes": lambda found: found.update(format=3, children={"part-00000.json": ""}),
    "parts with numbers for hashes": lambda found: found.update(format=3, children={"part-00000.json": 7}),
    "parts elsewhere": lambda found: found.update(format=3, children={"../part-00000.json": 64 * "0"}),
    "parts of a format without": lambda found: found.update(children={"part-00000.json": 64 * "0"}),
    "callbacks that are none": lambda found: found["facts"].update(callbacks=[1]),
    "an end that is none": lambda found: found["facts"].update(ended={"step": 3, "of": "4", "why": ""}),
    "an end without a reason": lambda found: found["facts"].update(ended={"step": 3, "of": 4}),
    "an end with more": lambda found: found["facts"].update(ended={"step": 3, "of": 4, "why": "", "more": 1}),
    "an attribute of Python's": lambda found: found["facts"].update(attributes={"__class__": 1}),
    "depth": lambda found: "[" * 200_000 + "]" * 200_000,
    "no object": lambda found: "[1]",
    "a number without end": lambda found: '{"format": ' + "1" * 10_000 + "}",
}


@pytest.mark.parametrize("name", FORGED)
def test_what_makes_no_sense_is_damage(name: str) -> None:
    with pytest.raises(Damaged, match="here describes no checkpoint: ") as found:
        Manifest.parse(forged(FORGED[name]), "here").check_whole("here")
    assert len(str(found.value)) < 200


def test_what_a_run_is_taken_up_by_must_be_there() -> None:
    with pytest.raises(Damaged, match="here describes no checkpoint of a run: it has no attributes"):
        part(0, 5).check_facts("here")


def test_boxes_hold_each_element_once() -> None:
    left, right = Box((0, 0), (4, 1)), Box((0, 1), (4, 2))
    top, bottom = Box((0, 0), (1, 3)), Box((1, 0), (3, 3))
    assert covered_once((4, 3), [left, right])
    assert covered_once((4, 3), [bottom, top])
    assert covered_once((), [Box((), ())])
    assert not covered_once((4, 3), [left])
    assert not covered_once((4, 3), [left, left, left]), "as many elements, but not each of them"
    assert not covered_once((2, 2), [Box((0, 0), (1, 2)), Box((0, 1), (2, 1))])
    assert not covered_once((), [])
