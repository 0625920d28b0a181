"""Which sample stands in which slot of which step: a pure function of (seed, step, slot), in O(1) memory.

Every epoch visits each sample once, in an order of its own. Where the samples do not divide into global batches,
``last_batch`` says what becomes of the rest: a smaller last step, none, or a larger one. World size and layout do not
enter, so any of them, and any resume, sees the same global batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from phalanx import counter
from phalanx.errors import WrongUse
from phalanx.task import LastBatch
from phalanx.words import many

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
        x[outside] = _sent_through(x[outside], rows, columns, turns)
        outside = x >= size
    return x.astype(np.int64)


def permute_each(index: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The same for permutations of different sizes and keys (uint64), one for each number of ``index``."""
    columns = np.sqrt((sizes - 1).astype(np.float64)).astype(np.uint64) + np.uint64(1)
    rows = (sizes.astype(np.uint64) + columns - np.uint64(1)) // columns
    turns = [counter.mix_array(keys + np.uint64(counter.GAMMA * turn % 2**64)) for turn in range(1, ROUNDS + 1)]
    x = index.astype(np.uint64)
    outside = np.ones(x.shape, dtype=bool)
    while outside.any():
        here = [turn[outside] for turn in turns]
        x[outside] = _sent_through(x[outside], rows[outside], columns[outside], here)
        outside = x >= sizes.astype(np.uint64)
    return x.astype(np.int64)


def _sent_through(x: np.ndarray, rows: Any, columns: Any, turns: Sequence[Any]) -> np.ndarray:
    row, column = np.divmod(x, columns)
    for turn in turns:
        row = (row + counter.mix_array(column ^ turn) % rows) % rows
        column = (column + counter.mix_array(row + turn) % columns) % columns
    return row * columns + column


@dataclass(frozen=True)
class Order:
    """The order of ``size`` samples in global batches of ``global_batch``."""

    size: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    last_batch: LastBatch = "keep"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise WrongUse("the data set is empty. Check what Task.data returns.")
        if self.size < self.global_batch and self.shuffle:
            raise WrongUse(
                f"the data set has {self.size} samples, fewer than one batch of {self.global_batch}. "
                f"Set global_batch to {self.size} or less, or give more data."
            )

    def with_last_batch(self, last_batch: LastBatch) -> Order:
        """The same order, in which this becomes of samples that do not fill an epoch's last global batch."""
        return replace(self, last_batch=last_batch)

    def facts(self) -> dict[str, Any]:
        """What it follows from beside size, batch and seed."""
        return {} if self.last_batch == "keep" or not self.rest else {"last_batch": self.last_batch}

    @property
    def rest(self) -> int:
        """How many samples of an epoch do not fill a global batch."""
        return self.size % self.global_batch

    @property
    def drawn(self) -> int:
        """How many samples an epoch trains on."""
        return self.size - self.rest if self.last_batch == "drop" else self.size

    @property
    def visits_all(self) -> bool:
        """Whether an epoch has each sample once, in global batches and a smaller last one."""
        return self.last_batch == "keep" or not self.rest

    @property
    def steps_per_epoch(self) -> int:
        if self.last_batch == "keep":
            return math.ceil(self.size / self.global_batch)
        return max(1, self.size // self.global_batch)

    def steps_in(self, epochs: float) -> int:
        """How many steps so many epochs have."""
        return max(1, round(epochs * self.steps_per_epoch))

    def describe(self) -> str:
        """What an epoch has, in words."""
        text = f"{many(self.size, 'sample')} an epoch"
        if self.visits_all:
            return text
        if self.last_batch == "drop":
            return (
                f"{text}, {many(self.rest, 'of them is', 'of them are')} left out, others each time (last_batch=drop)"
            )
        return f"{text}, its last step has {self.global_batch + self.rest:,} (last_batch=merge)"

    def tokens(self, ids: np.ndarray) -> np.ndarray | None:
        """How much there is to compute of each sample, if they differ: micro-batches and ranks share that evenly."""
        return None

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def slots(self, step: int) -> int:
        """How many samples this step has: ``global_batch``, but for the last one of an epoch."""
        place = step % self.steps_per_epoch
        if place == self.steps_per_epoch - 1:
            return self.drawn - place * self.global_batch
        return self.global_batch

    def micro_batches(self, slots: int, usual: int) -> int:
        """How many micro-batches a step of so many samples has, where one of ``global_batch`` has ``usual``.

        A step that others are merged into has more of them, and none that is larger.
        """
        more = self.last_batch == "merge" and slots > self.global_batch
        return math.ceil(usual * slots / self.global_batch) if more else usual

    def visits(self, step: int, slots: np.ndarray) -> np.ndarray:
        """By slot, which visit of its sample this is: what is drawn while a sample is read is keyed by both."""
        return np.full(len(slots), self.epoch(step))

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
