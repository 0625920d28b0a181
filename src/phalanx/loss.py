"""A loss as a sum and a count, and several of them by name.

``Loss(total, count)`` is what makes accumulation, padding and uneven batches right: totals and counts add up over
micro-batches and ranks, and the gradient is divided once, by the global count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import WrongUse


@dataclass
class Loss:
    """The loss of one micro-batch: a differentiable sum, and how many terms it has."""

    total: Tensor
    count: Tensor | int | float | None = None
    parts: Mapping[str, Loss] = field(default_factory=dict)
    """Losses that it is the sum of, by name."""

    def __mul__(self, weight: float | Tensor) -> Loss:
        """The loss so many times, over as many terms."""
        return Loss(self.total * weight, self.count, {name: part * weight for name, part in self.parts.items()})

    __rmul__ = __mul__


Counts = Callable[[list[str], Tensor], Tensor | None]
"""From the names of several losses and their counts in a micro-batch, those of the global batch."""
_counts: Counts | None = None


@contextmanager
def counted_by(counts: Counts) -> Iterator[None]:
    """Meanwhile `sum` asks this for the counts of the global batch."""
    global _counts
    outer, _counts = _counts, counts
    try:
        yield
    finally:
        _counts = outer


def sum(**named: Loss) -> Loss:
    """Several losses at once, each divided by its own count and logged under its name: ``sum(a=one, b=0.5 * other)``.

    It counts the terms of the loss that has most of them in the global batch; the others' totals are scaled to that.
    """
    if not named:
        raise WrongUse("phalanx.losses.sum got no losses. Give them by name, e.g. sum(class_=one, box=0.5 * other).")
    for name, loss in named.items():
        if not isinstance(loss, Loss) or not isinstance(loss.total, Tensor) or loss.count is None or loss.parts:
            raise WrongUse(
                f"phalanx.losses.sum got {_described(loss)} as {name}. Give each as one Loss(total, count), "
                "multiplied by its weight if it has one."
            )
    totals = [loss.total for loss in named.values()]
    like = totals[0].detach().double()
    own = torch.stack([torch.as_tensor(loss.count).detach().to(like).reshape(()) for loss in named.values()])
    every = own if _counts is None else _counts(list(named), own)
    if every is None:  # then the engine sees to it that they are the same
        return Loss(_added(totals), own[0], named)
    most = every.argmax()
    scales = torch.where(every > 0, every[most] / every, 0.0)
    scaled = [total * scale.to(total.dtype) for total, scale in zip(totals, scales, strict=True)]
    return Loss(_added(scaled), own[most], named)


def _added(totals: list[Tensor]) -> Tensor:
    whole = totals[0]
    for total in totals[1:]:
        whole = whole + total
    return whole


def _described(loss: Any) -> str:
    if not isinstance(loss, Loss):
        return f"a {type(loss).__name__}"
    return "a sum of losses" if loss.parts else "a loss without a count"
