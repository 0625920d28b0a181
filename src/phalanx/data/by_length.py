"""Samples of different lengths: batches of about one length, or of so many tokens.

Which samples a step has stays a pure function of (seed, step), as `Order` is: any number of ranks, any layout and any
resume sees the same ones. An epoch is laid out at once, from the lengths of all its samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phalanx import counter
from phalanx.data.order import Order, permute
from phalanx.errors import WrongUse
from phalanx.task import LastBatch

SORTED_STEPS = 50
"""So many steps' samples are sorted by length together, where a step shall have those of about one."""


class Epoch(NamedTuple):
    """Steps of an epoch: step ``i`` has ``ids[starts[i]:stops[i]]``."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


@dataclass(frozen=True)
class LengthOrder(Order):
    """Samples in an order of their own each epoch, those of a step of about one length, or of so many tokens."""

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), compare=False, repr=False)
    """Tokens of each sample."""
    grouped: bool = True
    """Whether samples of about one length are in a step."""
    batch_tokens: int = 0
    """Tokens of a step at most, of so many samples as have them; 0: it has ``global_batch`` samples."""
    hash: str = field(default="", init=False)
    """Of the lengths."""
    _before: list[int] = field(default_factory=lambda: [0], init=False, compare=False, repr=False)
    """How many steps come before each epoch, as far as they were counted."""
    _known: dict[int, Epoch] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The epoch that was asked for last."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", hashlib.sha256(self.lengths.astype(np.int64).tobytes()).hexdigest()[:16])
        longest = int(self.lengths.max(initial=0))
        if not self.batch_tokens:
            super().__post_init__()
        elif longest > self.batch_tokens:
            raise WrongUse(
                f"batch_tokens={self.batch_tokens} is less than the longest sample has, {longest} tokens. Set "
                f"batch_tokens to {longest} or more, or cut samples off at fewer."
            )

    def with_last_batch(self, last_batch: LastBatch) -> Order:
        if self.batch_tokens:
            raise WrongUse(
                f"last_batch={last_batch} is not for steps of batch_tokens={self.batch_tokens}, each of which has as "
                "many samples as have so many tokens. Leave one of the two out."
            )
        return super().with_last_batch(last_batch)

    def facts(self) -> dict[str, Any]:
        own = {"lengths": self.hash, "grouped": self.grouped, "batch_tokens": self.batch_tokens}
        return own | super().facts()

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        return self.lengths[ids]

    @property
    def steps_per_epoch(self) -> int:
        """Of the first epoch: where steps have so many tokens, others may have a few more or less."""
        return self._first_step(1)

    def steps_in(self, epochs: float) -> int:
        whole = int(epochs)
        first, next_first = self._first_step(whole), self._first_step(whole + 1)
        return max(1, first + round((epochs - whole) * (next_first - first)))

    def epoch(self, step: int) -> int:
        while self._before[-1] <= step:
            self._first_step(len(self._before))
        return int(np.searchsorted(self._before, step, side="right")) - 1

    def slots(self, step: int) -> int:
        return len(self.ids(step))

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        number = self.epoch(step)
        epoch, place = self._epoch(number), step - self._before[number]
        return epoch.ids[epoch.starts[place] : epoch.stops[place]][start:stop]

    def _first_step(self, epoch: int) -> int:
        """How many steps come before an epoch."""
        while len(self._before) <= epoch:
            self._before.append(self._before[-1] + len(self._epoch(len(self._before) - 1).starts))
        return self._before[epoch]

    @cached_property
    def _together(self) -> int:
        """How many samples are sorted together."""
        each = self.global_batch if not self.batch_tokens else self.batch_tokens / max(1.0, float(self.lengths.mean()))
        return max(1, round(SORTED_STEPS * each)) if self.grouped else self.size

    def _epoch(self, number: int) -> Epoch:
        """Samples shuffled, sorted by length a part at a time, cut into steps, and those shuffled."""
        if number not in self._known:
            self._known.clear()
            ids = permute(np.arange(self.drawn), self.size, counter.key(self.seed, "order", number))
            if self.grouped:
                ids = ids[np.lexsort((self.lengths[ids], np.arange(len(ids)) // self._together))]
            starts = self._cuts(ids)
            if self.last_batch == "merge" and self.rest:
                starts = starts[:-1]
            stops = np.append(starts[1:], len(ids))
            mixed = permute(np.arange(len(starts)), len(starts), counter.key(self.seed, "steps", number))
            self._known[number] = Epoch(ids, starts[mixed], stops[mixed])
        return self._known[number]

    def _cuts(self, ids: np.ndarray) -> np.ndarray:
        """Where steps begin among an epoch's samples; none has samples that were sorted apart from each other."""
        found = list[int]()
        upto = np.cumsum(self.lengths[ids])
        for first in range(0, len(ids), self._together):
            start, last = first, min(first + self._together, len(ids))
            while start < last:
                found.append(start)
                if self.batch_tokens:
                    taken = upto[start - 1] if start else 0
                    start = int(np.searchsorted(upto, taken + self.batch_tokens, side="right"))
                else:
                    start += self.global_batch
                start = min(start, last)
        return np.array(found)


class ByLength:
    """A data set with the lengths of its samples: trained on in steps of about one length, or of so many tokens."""

    def __init__(self, data: Any, lengths: Any, *, grouped: bool = True, batch_tokens: int = 0) -> None:
        """``lengths``: tokens of each sample. ``grouped``: samples of a step have about one length.

        ``batch_tokens``: a step has as many samples as have so many tokens at most; 0: ``global_batch`` of them.
        """
        self.data, self.lengths = data, np.asarray(lengths, dtype=np.int64)
        self.grouped, self.batch_tokens = grouped, batch_tokens
        if len(self.lengths) != len(data) or (len(data) and int(self.lengths.min()) < 0):
            raise WrongUse(
                f"there are {len(self.lengths):,} lengths for {len(data):,} samples. Give one from 0 up for each."
            )
        if batch_tokens < 0:
            raise WrongUse(f"batch_tokens={batch_tokens} is no number of tokens. Set it from 1 up, or to 0 for none.")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)

    def training_order(self, global_batch: int, seed: int) -> LengthOrder:
        return LengthOrder(
            len(self), global_batch, seed, lengths=self.lengths, grouped=self.grouped, batch_tokens=self.batch_tokens
        )
