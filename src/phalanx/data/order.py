"""Which sample stands in which slot of which step: a pure function of (seed, step, slot), in O(1) memory.

Every epoch visits each sample once, in an order of its own; the last step of an epoch takes what is left, so it may be
smaller. World size and layout do not enter, so any of them, and any resume, sees the same global batches.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from phalanx import counter
from phalanx.errors import WrongUse

ROUNDS = 4


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """A keyed permutation of ``range(size)`` applied to ``index``.

    A Feistel network over a grid just large enough to hold ``size``: rows are moved by a hash of the column and columns
    by a hash of the row, in turns. What lands outside is sent through again until it lands inside.
    """
    columns = np.uint64(math.isqrt(size - 1) + 1)
    rows = np.uint64(-(-size // int(columns)))
    turns = [np.uint64(counter.key(key, turn) & 0xFFFFFFFFFFFFFFFF) for turn in range(ROUNDS)]
    x = index.astype(np.uint64)
    outside = np.ones(x.shape, dtype=bool)
    while outside.any():
        row, column = np.divmod(x[outside], columns)
        for turn in turns:
            row = (row + counter.mix_array(column ^ turn) % rows) % rows
            column = (column + counter.mix_array(row + turn) % columns) % columns
        x[outside] = row * columns + column
        outside = x >= size
    return x.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The order of ``size`` samples in global batches of ``global_batch``."""

    size: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise WrongUse("the data set is empty. Check what Task.data returns.")
        if self.size < self.global_batch and self.shuffle:
            raise WrongUse(
                f"the data set has {self.size} samples, fewer than one batch of {self.global_batch}. "
                f"Set global_batch to {self.size} or less, or give more data."
            )

    @classmethod
    def of(cls, data: Any, size: int, global_batch: int, seed: int, trained: bool = True) -> Order:
        """The order that a data set of so many samples is trained on in: its own, if it has a ``training_order``.

        Not ``trained`` on: as they are, and they may be fewer than a batch.
        """
        if not trained:
            return Order(size, global_batch, seed, shuffle=False)
        own = getattr(data, "training_order", None)
        return Order(size, global_batch, seed) if own is None else own(global_batch, seed)

    def facts(self) -> dict[str, Any]:
        """What it follows from beside size, batch and seed."""
        return {}

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.size / self.global_batch)

    def steps_in(self, epochs: float) -> int:
        """How many steps so many epochs have."""
        return max(1, round(epochs * self.steps_per_epoch))

    def tokens(self, ids: np.ndarray) -> np.ndarray | None:
        """How much there is to compute of each sample, if they differ: micro-batches and ranks share that evenly."""
        return None

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def slots(self, step: int) -> int:
        """How many samples this step has: ``global_batch``, or what is left of the epoch."""
        first = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.size - first)

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The sample ids in slots ``start:stop`` of a step."""
        stop = self.slots(step) if stop is None else stop
        position = step % self.steps_per_epoch * self.global_batch + np.arange(start, stop, dtype=np.int64)
        if not self.shuffle:
            return position
        return permute(position, self.size, counter.key(self.seed, "order", self.epoch(step)))


def digest(ids: np.ndarray) -> str:
    """A short hash of a global batch's sample ids, the same on every rank of every layout."""
    return hashlib.sha256(ids.tobytes()).hexdigest()[:16]


def share(
    slots: int, micro_batches: int, ranks: int, rank: int, tokens: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """The slot range of each of a rank's micro-batches.

    A micro-batch is one contiguous range of slots over all ranks, so that what a batch-norm sees together does not
    depend on how many ranks there are. Ranges differ by one slot at most, or where samples have different ``tokens``
    about by those of one, and may be empty on some ranks.
    """
    ranges = []
    for first, last in parts(0, slots, min(micro_batches, slots), tokens):
        ranges.append(parts(first, last, ranks, tokens)[rank])
    return ranges


def leaf(slots: int, leaves: int, index: int, tokens: np.ndarray | None = None) -> tuple[int, int]:
    """The slot range of one of so many virtual micro-batches; it may be empty where a step has few samples."""
    return parts(0, slots, leaves, tokens)[index]


def parts(first: int, last: int, count: int, tokens: np.ndarray | None = None) -> list[tuple[int, int]]:
    """So many ranges that make up slots ``first:last``, of as many slots each as can be, or of as many tokens.

    None is empty where there are as many slots.
    """
    width = last - first
    if tokens is None:
        ends = [first + index * width // count for index in range(count + 1)]
        return list(pairwise(ends))
    upto = np.concatenate([[0], np.cumsum(tokens[first:last], dtype=np.int64)])
    ends = [0]
    for index in range(1, count):
        wanted = index * int(upto[-1]) / count
        near = int(np.searchsorted(upto, wanted))
        near -= near > 0 and wanted - upto[near - 1] < upto[min(near, width)] - wanted
        least, most = (ends[-1] + 1, width - (count - index)) if width >= count else (ends[-1], width)
        ends.append(min(max(near, least), most))
    return [(first + start, first + stop) for start, stop in pairwise([*ends, width])]
