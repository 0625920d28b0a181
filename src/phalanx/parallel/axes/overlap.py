"""Gradients of weights, computed while tensor parallelism sums the gradient of a container's input over ranks.

Autograd runs what was recorded last first, of all that it could run. So before the collective on the way into a
container, whose backward launches the sum, two kinds of nodes are recorded: one that waits for the sum
(`differentiable.awaited`), and after it one for each weight of the container's, in whose backward the product of its
gradient is computed. A linear's own backward gives the gradient of its input alone, and leaves to that node what the
product needs. No thread, no copy; the products are those that there were, in another order.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from phalanx.layout import Layout

LEAST_BYTES = 1 << 20
"""Of a container's input, for its sum to be worth the few nodes more in autograd's graph."""


def possible(layout: Layout) -> bool:
    """Not in a compiled block, whose order is the compiler's, nor where a schedule leaves these gradients for later."""
    return layout.compile == "none" and not (layout.pp > 1 and layout.schedule == "zb")


class LateWeight:
    """A linear's weight in one call of its container."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.left: dict[int, tuple[Tensor, Tensor]] = {}
        """By call of the linear: its input, and the gradient of its output."""
        self.calls = 0
        self.weight: Tensor = _Weight.apply(weight, self.left)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear``, whose weight gets its gradient when nothing that was recorded later is left to do."""
        self.calls += 1
        return _Linear.apply(x, self.weight, bias, self.left, self.calls)


class _Weight(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.left = left
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: None) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        while ctx.left:
            _, (x, by_output) = ctx.left.popitem()
            flat, rows = by_output.reshape(-1, by_output.shape[-1]).T, x.reshape(-1, x.shape[-1])
            total = flat @ rows if total is None else total.addmm_(flat, rows)
        return total, None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: dict[int, tuple[Tensor, Tensor]], call: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left, ctx.call = left, call
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.left[ctx.call] = x, gradient
        by_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, by_bias, None, None
