"""In compiled blocks, linears whose weights get their gradients later: a step that no compiler looks into.

The memory of what a program computes is the program's, and used again once nothing in it needs it. So what is left for
later is a copy.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.autograd import Function
from torch.library import custom_op

from phalanx.parallel.torch_private import place_in_memory

linear = nn.functional.linear
"""torch's own, whatever stands in its place while a block runs."""


class Leaves(Protocol):
    """Who is told of what is left."""

    def left(self, weight: tuple[int, int], input: Tensor, gradient: Tensor) -> None:
        """``weight``: its place in memory, which a program knows it by."""


_whose: WeakValueDictionary[str, Leaves] = WeakValueDictionary()


def known(leaves: Leaves) -> str:
    """By what it is found from now on: an operator takes words, and no objects."""
    name = next(word for n in count() if (word := str(n)) not in _whose)
    _whose[name] = leaves
    return name


class LaterLinear(Function):
    """A linear, of whose backward the weight's gradient is left to whoever has this name."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, whose: str) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.whose, ctx.biased = whose, bias is not None
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        back = _linear_backward(gradient, input, weight, ctx.whose)
        return back, None, gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.biased else None, None


@custom_op(
    "phalanx::linear_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor input, Tensor weight, str whose) -> Tensor",
)
def _linear_backward(gradient: Tensor, input: Tensor, weight: Tensor, whose: str) -> Tensor:
    """The gradient of the input, without which nothing would keep a compiler from leaving this out."""
    _whose[whose].left(place_in_memory(weight), input.clone(), gradient.clone())
    return gradient @ weight


@_linear_backward.register_fake
def _(gradient: Tensor, input: Tensor, weight: Tensor, whose: str) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])
