"""What a checkpoint says of itself: its tensors by layout-free names, where their chunks lie, their checksums."""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from phalanx.checkpoint import hashing
from phalanx.checkpoint.facts import checked_facts, missing_fact
from phalanx.checkpoint.weights import DTYPES
from phalanx.parallel.weights.boxes import Box
from phalanx.schema import LARGEST, is_count, is_plain, short

FORMATS = (1, 2, 3)
"""1: of a part, and in older versions of a whole, with all its chunks. 3: sums up others, and says which, with a hash
of each; in 2, which older versions wrote, without hashes."""
MANIFEST = "manifest.json"
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
CHILD = re.compile(r"(part|group)-\d{5,9}\.json")
PART_FILE = re.compile(r"part-\d{5,9}\.safetensors")
HASH = re.compile(r"[0-9a-f]{1,16}")
DIGEST = re.compile(r"[0-9a-f]{64}")
CHECKSUM = re.compile(r',"crc32":"([0-9a-f]{8})"\}\n?\Z')
NOT_FINITE = "not finite"
"""Such a number is an object with this one key: ``nan``, ``inf`` or ``-inf``."""
SITE = re.compile(r"sites/\d{1,9}/.")
"""How the names begin of what a site has of its own."""


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
    """A whole tensor: what it is, and its chunks, or which parts hold how much of it."""

    dtype: str
    shape: tuple[int, ...]
    hash: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    elements: int = 0
    """How many of its elements the parts hold that are summed up."""
    where: list[Any] = field(default_factory=list)
    """Of each of them, its number, and offsets and sizes of the box around what it holds: checked when used."""


@dataclass
class Manifest:
    """A checkpoint, one rank's part of it, or the sum of several."""

    facts: dict[str, Any]
    """Step, counters, scale, seed, layout, code, versions, generation."""
    tensors: dict[str, Held]
    numbers: dict[str, Any] = field(default_factory=dict)
    """What an optimizer keeps that is no tensor, by name."""
    children: dict[str, str] = field(default_factory=dict)
    """The files of the descriptions that this one sums up, if it does, and the SHA-256 of each; in format 2 none."""

    @property
    def step(self) -> int:
        return self.facts["step"]

    @property
    def has_hashes(self) -> bool:
        """Whether it has a hash of each file that it sums up, so that none can take the place of another."""
        return bool(self.children) and all(self.children.values())

    @property
    def size(self) -> int:
        if self.children:
            return sum(held.elements * DTYPE_NAMES[held.dtype].itemsize for held in self.tensors.values())
        return sum(chunk.length for held in self.tensors.values() for chunk in held.chunks)

    @cached_property
    def frozen(self) -> dict[str, Held]:
        """Weights that it leaves out, since nothing has changed them since the run began: what they are."""
        told = self.facts.get("frozen", {}).get("tensors", {})
        return {n: _held(n, {"dtype": d, "shape": s, "hash": h, "chunks": ()}) for n, (d, s, h) in told.items()}

    def weights(self) -> dict[str, Held]:
        """The model's weights and buffers by their own names, those that are left out too."""
        return {n.removeprefix("model/"): t for n, t in self.tensors.items() if n.startswith("model/")} | self.frozen

    def hash(self, under: str = "model/") -> str:
        """One hash of all tensors whose names begin so; the same whatever layout wrote them."""
        every = self.tensors | {f"model/{name}": held for name, held in self.frozen.items()}
        return hashing.joined((n, t.dtype, t.shape, t.hash) for n, t in every.items() if n.startswith(under))

    def to_json(self) -> bytes:
        """One JSON object, whose last field is the checksum of all before it."""
        tensors: dict[str, dict[str, Any]] = {}
        for name, held in self.tensors.items():
            tensors[name] = {"dtype": held.dtype, "shape": held.shape, "hash": f"{held.hash:016x}"}
            if self.children:
                tensors[name] |= {"elements": held.elements, "where": held.where}
            else:
                chunks = [[c.box.offsets, c.box.sizes, c.file, c.start, c.length, c.crc] for c in held.chunks]
                tensors[name]["chunks"] = chunks
        found = {"format": 3 if self.children else 1, "facts": self.facts, "numbers": self.numbers, "tensors": tensors}
        text = _dumped(found | ({"children": self.children} if self.children else {}))
        return f'{text[:-1]},"crc32":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> Manifest:
        text, check = _parted(content.decode(errors="replace"))
        if f"{zlib.crc32(text.encode()):08x}" != check:
            raise Damaged(where, "has changed since it was written, or was cut short")
        try:
            found = json.loads(text, object_hook=_finite_or_not if NOT_FINITE in text else None)
            if found["format"] not in FORMATS:
                raise Damaged(where, f"has format {found['format']}, and this version of Phalanx reads 1 to 3")
            children = _children(found["format"], found.get("children", []))
            tensors = {name: _held(name, held) for name, held in found["tensors"].items()}
            numbers = _numbers(found["numbers"])
            _check_names([*tensors, *numbers])
            manifest = cls(checked_facts(found["facts"]), tensors, numbers, children)
            if any(f"model/{name}" in tensors for name in manifest.frozen):
                raise ValueError("it holds what it says that it leaves out")
            return manifest
        except RecursionError:
            raise Damaged(where, "describes no checkpoint: it is nested too deep") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(where, f"describes no checkpoint: {error}") from None

    def check_whole(self, where: str) -> None:
        """Whether the chunks hold every element of every tensor once; of a sum, whether they are as many."""
        for name, held in self.tensors.items():
            boxes = [chunk.box for chunk in held.chunks]
            whole = held.elements == math.prod(held.shape) if self.children else covered_once(held.shape, boxes)
            if not whole:
                raise Damaged(where, f"describes no checkpoint: its chunks do not make up {name}")

    def check_facts(self, where: str) -> None:
        """Whether all is there that a run is taken up by."""
        if missing := missing_fact(self.facts):
            raise Damaged(where, f"describes no checkpoint of a run: it has no {missing}")


def digest(content: bytes) -> str:
    """The hash by which a description is named in the one that sums it up."""
    return hashlib.sha256(content).hexdigest()


def _children(format: int, found: Any) -> dict[str, str]:
    """What a description of this format sums up."""
    children = dict(_of_kind("children", found, dict)) if format == 3 else dict.fromkeys(found, "")
    named = len(children) == len(found) and all(map(CHILD.fullmatch, children))
    hashed = format != 3 or all(map(DIGEST.fullmatch, children.values()))
    if not (named and hashed) or bool(children) != (format > 1):
        raise ValueError("what it sums up are no parts")
    return children


def _parted(content: str) -> tuple[str, str]:
    """What a checksum is of, and the checksum; in older versions it was a line of its own."""
    found = CHECKSUM.search(content)
    if found is not None:
        return content[: found.start()] + "}", found[1]
    text, _, check = content.rstrip("\n").rpartition("\n")
    return text, check


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # JSON has no word for what is not finite
        return json.dumps(_worded(value), separators=(",", ":"), allow_nan=False)


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _worded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_worded(item) for item in value]
    return {NOT_FINITE: str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _finite_or_not(found: dict[str, Any]) -> Any:
    return float(found[NOT_FINITE]) if found.keys() == {NOT_FINITE} else found


def covered_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes, none of them beyond the ``shape``, hold each element of it once."""
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    if not shape:
        return len(boxes) == 1
    open_boxes: list[Box] = []  # those that reach into the row which is looked at
    for box in sorted(boxes, key=lambda box: box.offsets):
        open_boxes = [other for other in open_boxes if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        if any(meet(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def meet(one: Box, other: Box) -> bool:
    """Whether two boxes share an element."""
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in sides)


def _numbers(found: Any) -> dict[str, Any]:
    """What an optimizer keeps that is no tensor."""
    for name, value in _of_kind("numbers", found, dict).items():
        if not is_plain(value):
            raise ValueError(f"{name} is {short(value)}")
    return dict(found)


def _check_names(names: Iterable[str]) -> None:
    """Refuse what is a site's own and names no site."""
    for name in names:
        if name.startswith("sites/") and not SITE.match(name):
            raise ValueError(f"{short(name)} is of no site")


def _held(name: str, found: Mapping[str, Any]) -> Held:
    shape = counts(found["shape"])
    if found["dtype"] not in DTYPE_NAMES:
        raise ValueError(f"{name} has dtype {found['dtype']}")
    item = DTYPE_NAMES[found["dtype"]].itemsize
    if math.prod(shape) * item > LARGEST:
        raise ValueError(f"{name} has shape {list(shape)}")
    if not HASH.fullmatch(_of_kind("a hash", found["hash"], str)):
        raise ValueError(f"{name} has hash {short(found['hash'])}")
    value = int(found["hash"], 16)
    if "where" in found:
        (held,) = counts([found["elements"]])
        return Held(found["dtype"], shape, value, [], held, _of_kind("where", found["where"], list))
    return Held(found["dtype"], shape, value, [_chunk(name, shape, item, c) for c in found["chunks"]])


def _chunk(name: str, shape: tuple[int, ...], item: int, found: Sequence[Any]) -> Chunk:
    offsets, sizes, file, *rest = found
    box = Box(counts(offsets), counts(sizes))
    start, length, crc = counts(rest)
    inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
        (n > 0 or not whole) and a + n <= whole for a, n, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not inside or length != math.prod(box.sizes) * item:
        raise ValueError(f"a chunk of {name} is not a part of it")
    if not PART_FILE.fullmatch(_of_kind("a file's name", file, str)):
        raise ValueError(f"{file!r} is no file of a checkpoint")
    return Chunk(name, box, file, start, length, crc)


def counts(found: Any) -> tuple[int, ...]:
    """Whole numbers from 0 on."""
    if not all(map(is_count, found)):
        raise ValueError(f"{str(found)[:60]} are no sizes or places")
    return tuple(found)


def _of_kind(name: str, found: Any, kind: Any) -> Any:
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{name} is {short(found)}")
    return found
