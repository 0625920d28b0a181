"""What a checkpoint says of itself: its tensors by layout-free names, where their chunks lie, their checksums."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.checkpoint import hashing
from phalanx.parallel.boxes import Box

FORMAT = 1
MANIFEST = "manifest.json"


class Damaged(Exception):
    """A checkpoint is not what was written. Names the file and the reason."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file, self.reason = file, reason


def unreadable(file: str, error: OSError) -> Damaged:
    """What cannot be read, as damage."""
    return Damaged(file, f"cannot be read: {error.strerror or error}")


@dataclass(frozen=True)
class Chunk:
    """Some rows of a box of a tensor, as bytes of a file."""

    tensor: str
    box: Box
    file: str
    start: int
    length: int
    crc: int

    def checked(self, found: bytes, where: str) -> bytes:
        if len(found) != self.length:
            raise Damaged(where, f"is cut short: {self.tensor} has {len(found):,} of {self.length:,} bytes there")
        if zlib.crc32(found) != self.crc:
            raise Damaged(where, f"has changed since it was written: bytes {self.start:,} to "
                          f"{self.start + self.length:,} of {self.tensor} do not add up")  # fmt: skip
        return found


@dataclass
class Held:
    """A whole tensor: what it is, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    hash: int = 0
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Manifest:
    """A checkpoint, or one rank's part of it."""

    facts: dict[str, Any]
    """Step, counters, scale, seed, layout, code, versions, generation."""
    tensors: dict[str, Held]
    numbers: dict[str, Any] = field(default_factory=dict)
    """What an optimizer keeps that is no tensor, by name."""

    @property
    def step(self) -> int:
        return self.facts["step"]

    @property
    def size(self) -> int:
        return sum(chunk.length for held in self.tensors.values() for chunk in held.chunks)

    def hash(self, under: str = "model/") -> str:
        """One hash of all tensors whose names begin so; the same whatever layout wrote them."""
        return hashing.joined((n, t.dtype, t.shape, t.hash) for n, t in self.tensors.items() if n.startswith(under))

    @classmethod
    def merged(cls, parts: Iterable[Manifest]) -> Manifest:
        """The whole from all ranks' parts, which must neither overlap nor leave gaps."""
        parts = list(parts)
        options = {name: changed for part in parts for name, changed in part.facts.get("options", {}).items()}
        shared = {"options": options, "rank": 0}  # a stage knows the options of its own weights
        whole = cls({**parts[0].facts, **shared}, {})
        for part in parts:
            if {**part.facts, **shared} != whole.facts:
                raise Damaged(f"a part of step {whole.step}", "was written by another attempt to save that step")
            whole.numbers |= part.numbers
            for name, held in part.tensors.items():
                known = whole.tensors.setdefault(name, Held(held.dtype, held.shape))
                assert (known.dtype, known.shape) == (held.dtype, held.shape), name
                known.hash = (known.hash + held.hash) % (1 << 64)
                known.chunks += held.chunks
        for name, held in whole.tensors.items():
            written = sum(math.prod(chunk.box.sizes) for chunk in held.chunks)
            assert written == math.prod(held.shape), f"{name}: {written} of {math.prod(held.shape)} elements"
        return whole

    def to_json(self) -> bytes:
        """With a checksum of its own as the last line."""
        tensors = {
            name: {
                "dtype": held.dtype, "shape": held.shape, "hash": f"{held.hash:016x}",
                "chunks": [[*asdict(c.box).values(), c.file, c.start, c.length, c.crc] for c in held.chunks],
            }
            for name, held in self.tensors.items()
        }  # fmt: skip
        text = json.dumps({"format": FORMAT, "facts": self.facts, "numbers": self.numbers, "tensors": tensors})
        return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> Manifest:
        text, _, check = content.decode(errors="replace").rstrip("\n").rpartition("\n")
        if f"{zlib.crc32(text.encode()):08x}" != check:
            raise Damaged(where, "has changed since it was written, or was cut short")
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise Damaged(where, f"has format {found['format']}, and this version of Phalanx reads {FORMAT}")
        return cls(
            found["facts"], {name: _held(name, held) for name, held in found["tensors"].items()}, found["numbers"]
        )


def _held(name: str, found: Mapping[str, Any]) -> Held:
    chunks = [
        Chunk(name, Box(tuple(offsets), tuple(sizes)), file, start, length, crc)
        for offsets, sizes, file, start, length, crc in found["chunks"]
    ]
    return Held(found["dtype"], tuple(found["shape"]), int(found["hash"], 16), chunks)
