"""Exact sums: the same bits whoever computes them, and however many they are.

Numbers are added in pairs, the sums in pairs again, and so on: one binary tree over a step's virtual micro-batches, its
leaves. A run of 2, 4 or 8 of them is a node of it, so what a rank adds up by itself and what ranks add up together are
the same sums at any number of ranks. A norm is taken over shards, which are no leaves: its squares are added as whole
numbers, which have no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.parallel.communication.memory import Buffers

CHUNK = 1 << 16
"""Elements that are squared at once: what they become stays in a processor's cache."""
SMALLEST = -1000
"""No gradient counts for less than two to this: its square's scale would not be a number."""


def fold(rows: Tensor, output: Tensor | None = None) -> Tensor:
    """The sum of rows by the tree, into ``output`` or the first row. The rows are worked in."""
    step = 1
    while 2 * step < len(rows):
        rows[: len(rows) - step : 2 * step].add_(rows[step :: 2 * step])
        step *= 2
    if len(rows) == 1:
        return rows[0] if output is None else output.copy_(rows[0])
    return torch.add(rows[0], rows[step], out=rows[0] if output is None else output)


class Partial:
    """What has been added up of so many ``leaves`` that come in turn: a buffer for each one in their number's bits."""

    def __init__(self, leaves: int, buffers: Buffers) -> None:
        self.leaves, self.buffers = leaves, buffers
        self._sums: list[Tensor] = []
        self._count = 0

    def add(self, leaf: Tensor) -> Tensor | None:
        """Take a lent buffer in. With the last one, the sum of all, which is the caller's to give back."""
        self._sums.append(leaf)
        self._count += 1
        nodes = self._count
        while nodes % 2 == 0:
            right = self._sums.pop()
            self._sums[-1].add_(right)
            self.buffers.give(right)
            nodes //= 2
        if self._count < self.leaves:
            return None
        (total,), self._sums, self._count = self._sums, [], 0
        return total

    def clear(self) -> None:
        """Forget them, where a step did not come to its end."""
        for tensor in self._sums:
            self.buffers.give(tensor)
        self._sums, self._count = [], 0


def largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The largest absolute value of any element; infinity if one is not finite, which survives a maximum."""
    ends = [end.double() for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    top = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *ends]).abs().amax()
    return torch.where(top.isfinite(), top, math.inf)


class Squares:
    """Squares as whole numbers, in units so small that little is lost and so large that the sum of all is an int64.

    A square is two of them, the second in units of the first's: 60 bits and more below the largest square, up to
    four thousand million elements.
    """

    def __init__(self, largest: float, elements: int) -> None:
        self.exponent = max(SMALLEST, math.frexp(largest)[1])  # every element is less than two to this
        self.bits = 62 - elements.bit_length()

    def sum(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """``[2]``: of these elements. Those of all ranks add up, in any order."""
        sums = torch.zeros(2, dtype=torch.int64, device=device)
        for tensor in tensors:
            for chunk in tensor.reshape(-1).split(CHUNK):
                units = chunk.to(torch.float64, copy=True).mul_(math.ldexp(1.0, -self.exponent))
                units.mul_(units).mul_(2.0**self.bits)
                high = units.to(torch.int64)
                sums[0] += high.sum()
                sums[1] += units.sub_(high).mul_(2.0**self.bits).to(torch.int64).sum()
        return sums

    def root(self, sums: Tensor) -> float:
        """The root of all squares' sum: a norm."""
        high, low = sums.tolist()
        return math.sqrt((high << self.bits) + low) * math.ldexp(1.0, self.exponent - self.bits)
