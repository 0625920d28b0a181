"""Linears of compiled blocks whose weights get their gradients later. Compiled: tests/parallel/blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel.axes.later import LaterLinear, known
from phalanx.parallel.axes.pipeline import weight_gradient
from phalanx.parallel.torch_private import place_in_memory


class Kept:
    """Keeps what is left."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Tensor, Tensor]] = []

    def left(self, weight: int, input: Tensor, gradient: Tensor) -> None:
        self.found.append((weight, input, gradient))


def test_the_weights_gradient_is_left_and_the_rest_is_not() -> None:
    kept = Kept()
    whose = known(kept)
    sizes = (2, 3, 4), (5, 4), (5,)
    x, weight, bias = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).sin().sum(), (x, weight, bias))

    LaterLinear.apply(x, weight, bias, whose).sin().sum().backward()
    assert weight.grad is None
    assert torch.allclose(x.grad, expected[0])
    assert torch.allclose(bias.grad, expected[2])
    (found,) = kept.found
    assert found[0] == place_in_memory(weight)
    assert torch.allclose(weight_gradient(*found[1:]), expected[1])
    assert found[1].data_ptr() != x.data_ptr(), "a program would use its memory again"
