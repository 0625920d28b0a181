"""Samples drawn more or less often than others: by weights, with replacement, or so that classes come equally often.

As `Order`, pure functions of (seed, step, slot): there is no sampler with a state, and any number of ranks and any
resume draws the same. An epoch has as many draws as there are samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import counter
from phalanx.data.order import Order, permute_each
from phalanx.errors import WrongUse
from phalanx.words import many


@dataclass(frozen=True)
class DrawnOrder(Order):
    """An order in which a sample may come several times in an epoch."""

    visits_all = False

    def _numbers(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The draws of a step, as numbered from the first of the run."""
        epoch, place = divmod(step, self.steps_per_epoch)
        stop = self.slots(step) if stop is None else stop
        return epoch * self.drawn + place * self.global_batch + np.arange(start, stop, dtype=np.int64)

    def visits(self, step: int, slots: np.ndarray) -> np.ndarray:
        """Each draw is a visit of its own: a sample that comes twice in a step is not augmented alike."""
        return self._numbers(step)[slots]


@dataclass(frozen=True)
class WeightedOrder(DrawnOrder):
    """Independent draws with replacement, each sample with a probability in proportion to its weight."""

    weights: np.ndarray = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)
    hash: str = field(default="", init=False)
    """Of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hash", _hash(self.weights))

    def facts(self) -> dict[str, Any]:
        return {"weights": self.hash} | super().facts()

    @cached_property
    def _upto(self) -> np.ndarray:
        """The sum of all weights up to each sample's."""
        return np.cumsum(self.weights)

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The sample ids in slots ``start:stop`` of a step."""
        bits = _bits(self._numbers(step, start, stop), counter.key(self.seed, "weighted"))
        drawn = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found = np.searchsorted(self._upto, drawn * self._upto[-1], side="right")
        return np.minimum(found, self._last).astype(np.int64)

    @cached_property
    def _last(self) -> int:
        """The last sample that can be drawn: rounding must not go beyond it."""
        return int(np.flatnonzero(self.weights)[-1])

    @property
    def seen(self) -> float:
        """The part of samples that an epoch is expected to draw at least once."""
        chances = self.weights / self._upto[-1]
        return float(-np.expm1(self.drawn * np.log1p(-np.minimum(chances, 1 - 1e-16))).mean())

    def describe(self) -> str:
        return f"{_draws(self)}; weighted: about {self.seen:.0%} of samples are seen in an epoch"


@dataclass(frozen=True)
class BalancedOrder(DrawnOrder):
    """Every class once in each round of draws, and all samples of a class before one of them comes again."""

    column: str = ""
    classes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), compare=False, repr=False)
    """Of each sample, numbered from 0."""
    hash: str = field(default="", init=False)
    """Of the classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hash", _hash(self.classes))

    def facts(self) -> dict[str, Any]:
        return {"balance": self.column, "classes": self.hash} | super().facts()

    @cached_property
    def _counts(self) -> np.ndarray:
        """How many samples each class has."""
        return np.bincount(self.classes)

    @cached_property
    def _by_class(self) -> np.ndarray:
        """The samples of the first class, then those of the second, and so on."""
        return np.argsort(self.classes, kind="stable")

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum(self._counts) - self._counts

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The sample ids in slots ``start:stop`` of a step."""
        count = len(self._counts)
        visit, place = np.divmod(self._numbers(step, start, stop), count)
        among = _bits(visit, counter.key(self.seed, "classes"))
        kind = permute_each(place, np.full(len(place), count), among)
        epoch, number = np.divmod(visit, self._counts[kind])
        inside = counter.mix_array(_bits(epoch, counter.key(self.seed, "order")) + kind.astype(np.uint64))
        return self._by_class[self._starts[kind] + permute_each(number, self._counts[kind], inside)]

    def describe(self) -> str:
        each = self.drawn / len(self._counts)
        most, least = int(self._counts.max()), int(self._counts.min())
        return (
            f"{_draws(self)}; balanced: {many(len(self._counts), 'class', 'classes')} of {self.column!r} equally "
            f"often, a sample of the largest ({most:,}) {each / most:.3g} times an epoch and one of the smallest "
            f"({least:,}) {each / least:.3g} times"
        )


def weighted(order: Order, weights: Sequence[float] | Tensor, name: str) -> WeightedOrder:
    """The draws that these weights ask for; ``name``: who gave them."""
    try:
        found = torch.as_tensor(weights).detach().cpu().double().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongUse(f"{name} gave no numbers ({error}). Return one weight for each sample.") from None
    if found.shape != (order.size,):
        raise WrongUse(
            f"{name} gave weights of shape {tuple(found.shape)} for {many(order.size, 'sample')}. Return one weight a "
            "sample, in the order of the data."
        )
    if not (np.isfinite(found).all() and (found >= 0).all() and np.isfinite(found.sum()) and found.any()):
        raise WrongUse(f"{name} gave weights that draw nothing. Return numbers from 0 up, and one at least above 0.")
    return WeightedOrder(order.size, order.global_batch, order.seed, last_batch=order.last_batch, weights=found)


def balanced(order: Order, labels: Any, column: str) -> BalancedOrder:
    """Classes equally often; ``labels``: the class of each sample."""
    found = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if found.shape != (order.size,):
        raise WrongUse(
            f"balance={column!r} has values of shape {tuple(found.shape)} for {many(order.size, 'sample')}. Name a "
            "column with one class for each sample."
        )
    if found.dtype.kind == "f" and not (np.isfinite(found).all() and (found == np.round(found)).all()):
        raise WrongUse(f"balance={column!r} has real numbers, which are no classes. Name a column of classes.")
    _, classes = np.unique(found, return_inverse=True)
    return BalancedOrder(
        order.size, order.global_batch, order.seed, last_batch=order.last_batch, column=column, classes=classes
    )


def _draws(order: DrawnOrder) -> str:
    """How many draws an epoch has; nothing is left over of draws, but for how they divide into steps."""
    how = "" if order.last_batch == "keep" or not order.rest else f" (last_batch={order.last_batch})"
    return f"{many(order.drawn, 'draw')} an epoch{how}"


def _hash(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def _bits(index: np.ndarray, key: int) -> np.ndarray:
    """64 random bits for each index of a stream."""
    with np.errstate(over="ignore"):
        stream = np.uint64(key & 0xFFFFFFFFFFFFFFFF)
        return counter.mix_array((index.astype(np.uint64) + np.uint64(1)) * np.uint64(counter.GAMMA) + stream)
