"""Several sources trained on together, each with a weight that may change with the step.

How many samples of a step come from which source, and which, is a pure function of (seed, step, slot), as `Order` is:
any number of ranks and any resume see the same. Within a source no sample comes a second time before all have come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx import counter
from phalanx.data.order import Order, permute
from phalanx.errors import WrongUse
from phalanx.task import LastBatch

CHUNK = 4096
"""Steps whose samples are counted together, to know where each source stands."""

Weights = Sequence[float]
Curriculum = Weights | Mapping[str, Weights]
"""Weights, or weights by the step that they begin with: a number of steps, or below 1 a share of all."""


class Joined:
    """Data sets one after another; a sample also has ``source``, the number of the one that it is from."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.names, self.parts = list(sources), list(sources.values())
        self.sizes = [len(part) for part in self.parts]
        if not self.parts or not all(self.sizes):
            raise WrongUse("a mixture needs sources, and a sample at least in each. Check what they are made from.")
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return {**self.parts[number][index - int(self.starts[number])], "source": number}


class Mixture(Joined):
    """Sources to train on together, by weights: a number each, or such by step (`Curriculum`)."""

    def __init__(self, sources: Mapping[str, Any], weights: Curriculum = (), steps: int = 0) -> None:
        """``weights``: by default the number of samples of each. ``steps``: of the training, for shares of it."""
        super().__init__(sources)
        self.curriculum = _curriculum(weights or self.sizes, len(self.parts), steps)

    def training_order(self, global_batch: int, seed: int) -> MixtureOrder:
        """Which samples of which source are in which step."""
        return MixtureOrder(len(self), global_batch, seed, sizes=tuple(self.sizes), curriculum=self.curriculum)


@dataclass(frozen=True)
class MixtureOrder(Order):
    """The order of a mixture's samples: in each step each source has its share, rounded so that shares are met."""

    sizes: tuple[int, ...] = ()
    curriculum: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """From which step on which weights hold; they add up to 1."""
    _before: list[np.ndarray] = field(default_factory=list, init=False, compare=False, repr=False)
    """How many samples of each source come before each chunk of steps, as far as they were counted."""

    def __post_init__(self) -> None:
        self._before.append(np.zeros(len(self.sizes), dtype=np.int64))

    def with_last_batch(self, last_batch: LastBatch) -> Order:
        raise WrongUse(
            f"last_batch={last_batch} is not for a Mixture: each of its steps has global_batch={self.global_batch} "
            "samples, and none is left over. Leave it out."
        )

    def facts(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes), "curriculum": [[step, list(weights)] for step, weights in self.curriculum]}

    def epoch(self, step: int) -> int:
        """What is drawn for a sample follows from the step: sources have epochs of their own."""
        return step

    def slots(self, step: int) -> int:
        return self.global_batch

    def counts(self, steps: np.ndarray) -> np.ndarray:
        """How many samples of each source some steps have: ``[step, source]``, each row of them one global batch."""
        begins = np.array([step for step, _ in self.curriculum])
        now = np.searchsorted(begins, steps, side="right") - 1
        weights = np.array([weights for _, weights in self.curriculum])[now]
        stream = np.uint64(counter.key(self.seed, "mixture") & 0xFFFFFFFFFFFFFFFF)
        with np.errstate(over="ignore"):
            drawn = counter.mix_array(steps.astype(np.uint64) * np.uint64(counter.GAMMA) + stream)
        offset = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        upto = np.cumsum(weights, axis=1) * self.global_batch
        upto[:, -1] = self.global_batch
        return np.diff(np.floor(upto + offset[:, None]).astype(np.int64), axis=1, prepend=0)

    def before(self, step: int) -> np.ndarray:
        """How many samples of each source come before a step."""
        while len(self._before) <= step // CHUNK:
            first = (len(self._before) - 1) * CHUNK
            self._before.append(self._before[-1] + self.counts(np.arange(first, first + CHUNK)).sum(0))
        first = step // CHUNK * CHUNK
        return self._before[step // CHUNK] + self.counts(np.arange(first, step)).sum(0)

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The sample ids in slots ``start:stop`` of a step, numbered as `Joined` numbers them."""
        counts, before = self.counts(np.array([step]))[0], self.before(step)
        found, offset = [], 0
        for source, (count, size) in enumerate(zip(counts, self.sizes, strict=True)):
            number = before[source] + np.arange(count)
            ids = np.empty(count, dtype=np.int64)
            for epoch in np.unique(number // size):
                now = number // size == epoch
                key = counter.key(self.seed, "order", source, int(epoch))
                ids[now] = permute(number[now] % size, size, key)
            found.append(ids + offset)
            offset += size
        mixed = permute(np.arange(self.global_batch), self.global_batch, counter.key(self.seed, "slots", step))
        return np.concatenate(found)[mixed][start:stop]


def _curriculum(weights: Curriculum, sources: int, steps: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Weights by the step that they begin with, in order, each adding up to 1."""
    found: dict[int, tuple[float, ...]] = {}
    for begins, each in weights.items() if isinstance(weights, Mapping) else [("0", weights)]:
        total = math.fsum(each)
        if len(each) != sources or min(each) < 0 or not 0 < total < math.inf:
            told = f"weights {', '.join(f'{weight:g}' for weight in each)} are none of {sources} sources"
            raise WrongUse(f"{told}. Give each source a number from 0 up, and one at least above 0.")
        found[_step(str(begins), steps)] = tuple(weight / total for weight in each)
    if 0 not in found:
        raise WrongUse("the weights do not say what holds at the beginning. Give weights for step 0.")
    return tuple(sorted(found.items()))


def _step(begins: str, steps: int) -> int:
    try:
        number = float(begins)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf or (number >= 1 and number != int(number)):
        raise WrongUse(f"weights begin at {begins!r}, which is no step. Give a number of steps, or a share below 1.")
    if 0 < number < 1 and not steps:
        raise WrongUse(f"weights begin at {begins} of the training, of unknown length. Say how many steps it has.")
    return round(number * steps) if number < 1 else int(number)
