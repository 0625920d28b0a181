"""A fingerprint of a data set: its length, and hashes of some samples at places that follow from the length."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import counter

SAMPLES = 8
"""So many are looked at, or fewer where they take long to read."""
SECONDS = 0.15

Read = Callable[[int], Any]


@dataclass(frozen=True)
class Fingerprint:
    """What a data set looked like."""

    size: int
    samples: dict[str, str] = field(default_factory=dict)
    """By index, as text, a hash."""
    repeatable: bool = True
    """Whether a sample that is read twice is the same."""

    @classmethod
    def of(cls, size: int, read: Read, data: Any = None) -> Fingerprint:
        """Of as many samples as can be read in a moment; of none where one cannot be read, which training will tell."""
        try:
            samples = _hashes(near(data, _places(size)), read)
            again = {name: digest(read(int(name))) for name in list(samples)[:1]}
        except Exception:
            return cls(size)
        return cls(size, samples, all(samples[name] == found for name, found in again.items()))

    @classmethod
    def parse(cls, found: Any) -> Fingerprint | None:
        """As it was written down; None if this is none."""
        if not isinstance(found, Mapping) or not isinstance(found.get("samples"), Mapping):
            return None
        samples = {str(name): str(value) for name, value in found["samples"].items()}
        return cls(int(found["size"]), samples, bool(found["repeatable"]))

    def others(self, now: Fingerprint) -> tuple[list[int], int]:
        """Which samples are not what they were, and how many both have looked at."""
        common = [name for name in self.samples if name in now.samples]
        return [int(name) for name in common if now.samples[name] != self.samples[name]], len(common)

    def repeats(self, index: int, read: Read) -> bool:
        """Whether a sample that was looked at is the same when it is read again."""
        return digest(read(index)) == self.samples[str(index)]


def _places(size: int) -> list[int]:
    drawn = [counter.key("fingerprint", size, number) % size for number in range(SAMPLES - 2)] if size else []
    return list(dict.fromkeys([size - 1, 0, *drawn])) if size else []


def near(data: Any, places: Iterable[int]) -> list[int]:
    """Samples to look at instead of some, of data that says which ones near them are read sooner."""
    found = getattr(data, "near", None)
    return list(dict.fromkeys(places if found is None else map(found, places)))


def _hashes(places: Iterable[int], read: Read) -> dict[str, str]:
    """Of one sample at least, and then of as many as a moment allows."""
    found: dict[str, str] = {}
    until = time.monotonic() + SECONDS
    for place in places:
        found[str(place)] = digest(read(place))
        if time.monotonic() > until:
            break
    return found


def digest(value: Any) -> str:
    """A short hash of a sample's contents."""
    found = hashlib.sha256()

    def begin(*kind: Any) -> None:
        """What follows, and how much of it: two things side by side are not one."""
        found.update(repr(kind).encode())

    def add(item: Any) -> None:
        if isinstance(item, dict):
            begin("dict", len(item))
            for name in sorted(item, key=str):
                add(str(name))
                add(item[name])
        elif isinstance(item, (list, tuple)):
            begin("list", len(item))
            for inner in item:
                add(inner)
        elif isinstance(item, Tensor):
            begin("tensor", item.dtype, tuple(item.shape))
            found.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, np.ndarray) and item.dtype != object:
            begin("array", item.dtype, item.shape)
            found.update(np.ascontiguousarray(item).tobytes())
        elif hasattr(item, "__array__") and not isinstance(item, np.ndarray | np.generic):  # an image, perhaps
            add(np.asarray(item))
        else:
            text = re.sub(r" at 0x[0-9a-f]+", "", repr(item)).encode()
            begin("text", len(text))
            found.update(text)

    add(value)
    return found.hexdigest()[:12]
