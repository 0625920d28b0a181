"""Generators seeded for each sample, so that what is drawn while it is read depends on nothing else.

People's data code draws from Python's, numpy's and torch's own generators, which are seeded by (seed, visit, sample).
A data set that draws from generators of its own, as some libraries do, has a method ``reseed(seed)``, which is called
with the same number before each sample is read.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import counter

MASK = 0xFFFFFFFF
INSIDE = ("data", "dataset", "datasets", "parts")
"""Where data sets keep those that they read from."""
PLAIN = (Tensor, np.ndarray, Mapping, list, tuple, str, bytes)
DEEPEST = 8


def seed_globally(*key: int | str) -> None:
    """Seed the generators that people's data code draws from, by a key that does not depend on the rank."""
    seed = counter.key(*key) & MASK
    for seeded in SEEDED:
        seeded(seed)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


SEEDED: tuple[Callable[[int], None], ...] = (random.seed, np.random.seed, _seed_torch)


def sample_seed(seed: int, visit: int, index: int) -> int:
    """What the generators are seeded with for a visit of a sample: the same as by ``seed_globally``, and faster."""
    text = f"int:{seed}\x1fstr:sample\x1fint:{visit}\x1fint:{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & MASK


def sample_at(data: Any, index: int, seed: int, visit: int = 0) -> Any:
    """One sample; what is drawn while it is made follows from the seed, which visit it is, and its number."""
    number = sample_seed(seed, visit, index)
    for seeded in (*SEEDED, *_reseeded(data)):
        seeded(number)
    return data[index]


class SampleReader:
    """Reads samples of a data set, each with all generators seeded."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed
        self._seeded = (*SEEDED, *dict.fromkeys(_reseeded(data)))

    def read(self, index: int, visit: int = 0) -> Any:
        """One sample; what is drawn while it is made follows from the seed, which visit it is, and its number."""
        number = sample_seed(self.seed, visit, index)
        for seeded in self._seeded:
            seeded(number)
        return self.data[index]


def _reseeded(data: Any, depth: int = 0) -> Iterator[Callable[[int], None]]:
    """The ``reseed`` of a data set, and of those that it reads from."""
    own = getattr(data, "reseed", None)
    if callable(own):
        yield own
    for name in INSIDE if depth < DEEPEST else ():
        inner = getattr(data, name, None)
        for each in inner if isinstance(inner, (list, tuple)) and name in ("datasets", "parts") else [inner]:
            if hasattr(type(each), "__getitem__") and not isinstance(each, PLAIN):
                yield from _reseeded(each, depth + 1)
