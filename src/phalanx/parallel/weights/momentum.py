"""Gradients that travel as the momentum they make (``comm=onebit``): what all replicas know of it beforehand is added.

The momentum after a step is ``b m + (1 - b) G / D``, of which every replica knows ``m`` and has its own part of the
sum ``G``. So each says ``g + b / (1 - b) * m * D / N``, and what all of them say, times ``(1 - b) / D``, is the
momentum. By how much sums will be divided, ``D``, is known only after the step: that of the last one stands for it, on
all replicas alike, and what that is off by is put right when weights are updated.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from phalanx.parallel.weights.weight import Weight

Pieces = Iterable[tuple[Weight, Tensor]]
"""Weights, and of each the gradient of the rows that this rank owns."""


class Momentum:
    """Of the weights that this rank owns rows of."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[Tensor, float]] = {}
        """By weight, what its optimizer keeps, and how much of that stays in a step; of those that it updates."""
        self.divisor = 1.0
        """By which sums of gradients will be divided, about."""

    def add(self, gradients: Pieces, share: float) -> None:
        """Put a ``share`` of what momentum is, in units of sums of gradients, to these."""
        for weight, own in gradients:
            if weight.name in self.of:
                momentum, stays = self.of[weight.name]
                own.add_(momentum.to(own.device), alpha=share * self.divisor * stays / (1 - stays))

    def become(self, gradients: Pieces) -> None:
        """Have sums to which all of it was put be, divided as gradients are, the new momentum."""
        for weight, own in gradients:
            if weight.name in self.of:
                own.mul_(1 - self.of[weight.name][1])
