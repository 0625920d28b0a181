"""FLOPs are those of the textbook, and what cannot be counted is named and computed all the same."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from phalanx.train.profile.flops import FlopCount


def test_a_products_forward_and_backward() -> None:
    counted: list[int] = []
    x, layer = torch.randn(5, 8, requires_grad=True), nn.Linear(8, 3, bias=False)
    with FlopCount(counted.append):
        layer(x).sum().backward()
    assert counted == [2 * 5 * 8 * 3] * 3


def test_as_torchs_own_counter_has_it() -> None:
    counted: list[int] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    x = torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    with FlopCount(counted.append):
        model(x).sum().backward()
    assert sum(counted) == theirs.get_total_flops()


def test_attention_of_any_kind() -> None:
    counted: list[int] = []
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    with FlopCount(counted.append):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    one = 2 * 2 * 4 * 16 * 16 * 8
    assert counted == [2 * one, 5 * one]


def test_a_formula_that_fails_costs_nothing_else() -> None:
    def broken(flops: int) -> None:
        raise KeyError(flops)

    with FlopCount(broken) as count:
        found = torch.ones(2, 3) @ torch.ones(3, 2)
    assert torch.equal(found, torch.full((2, 2), 3.0))
    assert count.uncounted == {"aten.mm"}
