"""The order of samples that lie in shards, each of which can only be read from its beginning on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phalanx import counter
from phalanx.data.order import Order, permute

CHUNK = 1024
"""Samples of a shard that are read, and shuffled, at a time,"""
WINDOW = 4
"""and shards that are read side by side."""


class EpochRounds(NamedTuple):
    """An epoch: in each round ``window`` shards give their next chunks, and those samples are shuffled."""

    shards: np.ndarray
    """In the order that the epoch reads them."""
    starts: np.ndarray
    """How many samples of the epoch come before each round, and how many it has."""
    firsts: np.ndarray
    """The first of each round's shards, as a place among ``shards``,"""
    chunks: np.ndarray
    """and which chunk of them it takes."""


@dataclass(frozen=True)
class ShardOrder(Order):
    """Shards in a keyed order, some side by side; what they give at a time is shuffled, so that all read forwards.

    As `Order`, a pure function of (seed, step, slot), in which each epoch visits each sample once.
    """

    sizes: tuple[int, ...] = ()
    """Samples of each shard."""
    chunk: int = CHUNK
    window: int = WINDOW
    _known: dict[int, EpochRounds] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The epoch that was asked for last."""

    def facts(self) -> dict[str, Any]:
        return {"shards": list(self.sizes), "chunk": self.chunk, "window": self.window} | super().facts()

    @cached_property
    def _before(self) -> np.ndarray:
        """How many samples lie before each shard."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The sample ids in slots ``start:stop`` of a step: shard after shard."""
        stop = self.slots(step) if stop is None else stop
        position = step % self.steps_per_epoch * self.global_batch + np.arange(start, stop, dtype=np.int64)
        epoch = self.epoch(step)
        rounds, found = self._rounds(epoch), np.empty_like(position)
        number = np.searchsorted(rounds.starts, position, side="right") - 1
        for each in np.unique(number).tolist():
            here, first = number == each, int(rounds.starts[each])
            size, key = int(rounds.starts[each + 1]) - first, counter.key(self.seed, "round", epoch, each)
            found[here] = self._in_round(rounds, each, permute(position[here] - first, size, key))
        return found

    def _in_round(self, rounds: EpochRounds, number: int, places: np.ndarray) -> np.ndarray:
        """The ids of some places of a round, its chunks laid one after another."""
        first, chunk = int(rounds.firsts[number]), int(rounds.chunks[number])
        shards = rounds.shards[first : first + self.window]
        counts = np.clip(np.asarray(self.sizes)[shards] - chunk * self.chunk, 0, self.chunk)
        before = np.concatenate([[0], np.cumsum(counts)])
        which = np.searchsorted(before, places, side="right") - 1
        return self._before[shards[which]] + chunk * self.chunk + places - before[which]

    def _rounds(self, epoch: int) -> EpochRounds:
        if epoch not in self._known:
            self._known.clear()
            sizes, count = np.asarray(self.sizes, dtype=np.int64), len(self.sizes)
            shards = permute(np.arange(count), count, counter.key(self.seed, "shards", epoch))
            totals, firsts, chunks = [], [], []
            for first in range(0, count, self.window):
                side_by_side = sizes[shards[first : first + self.window]]
                for chunk in range(-(-int(side_by_side.max()) // self.chunk)):
                    totals.append(int(np.clip(side_by_side - chunk * self.chunk, 0, self.chunk).sum()))
                    firsts.append(first)
                    chunks.append(chunk)
            starts = np.concatenate([[0], np.cumsum(totals)]).astype(np.int64)
            self._known[epoch] = EpochRounds(shards, starts, np.array(firsts), np.array(chunks))
        return self._known[epoch]
