"""LoRA beside linears: formulae, and what is frozen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from phalanx import WrongUse
from phalanx.models.lora import Lora, LoraKind, LoraLinear, attach, is_lora, merged


def made(kind: LoraKind, dropout: float = 0.0) -> LoraLinear:
    torch.manual_seed(0)
    linear = LoraLinear(nn.Linear(6, 5), Lora(2, 3.0, kind, dropout)).double()
    nn.init.normal_(linear.lora_B.weight)
    if linear.lora_magnitude_vector is not None:
        nn.init.uniform_(linear.lora_magnitude_vector, 1, 2)
    return linear


def whole(linear: LoraLinear) -> torch.Tensor:
    with torch.no_grad():
        low_rank = linear.lora_A.weight, linear.lora_B.weight, linear.lora_magnitude_vector
        return merged(linear.weight, *low_rank, linear.scale)


@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
def test_it_computes_what_the_merged_weight_does(kind: LoraKind) -> None:
    linear, x = made(kind), torch.randn(4, 6, dtype=torch.float64)
    assert torch.allclose(linear(x), nn.functional.linear(x, whole(linear), linear.bias))
    assert linear.scale == (3 / math.sqrt(2) if kind == "rslora" else 1.5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_it_begins_as_the_linear_alone(kind: LoraKind) -> None:
    base, x = nn.Linear(6, 5), torch.randn(4, 6)
    assert torch.allclose(LoraLinear(base, Lora(2, 3.0, kind, 0.5))(x), base(x), atol=1e-6)


def test_a_rows_own_length_has_no_gradient() -> None:
    linear, x = made("dora"), torch.randn(4, 6, dtype=torch.float64)
    assert torch.allclose(whole(linear).norm(dim=1), linear.lora_magnitude_vector)
    linear(x).sum().backward()
    summed = linear.weight + linear.scale * linear.lora_B.weight @ linear.lora_A.weight
    factor = (linear.lora_magnitude_vector / summed.norm(dim=1)).detach()
    expected = linear.scale * factor.unsqueeze(1) * (x @ linear.lora_A.weight.T).sum(0)
    assert torch.allclose(linear.lora_B.weight.grad, expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 3)


def test_the_linears_of_blocks_or_those_that_are_named() -> None:
    assert attach(Model(), Lora(2, 2)) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert attach(Model(), Lora(2, 2), ["up"]) == ["blocks.0.up", "blocks.1.up"]
    assert attach(Model(), Lora(2, 2), [r"blocks\.1\..*", "head"]) == ["blocks.1.up", "blocks.1.down", "head"]
    model = Model()
    attach(model, Lora(2, 2), ["down"])
    assert {n for n, w in model.named_parameters() if w.requires_grad} == {
        n for n, _ in model.named_parameters() if is_lora(n)
    }
    with pytest.raises(WrongUse, match="lora_targets=dwn matches no linear of Model; did you mean 'down'"):
        attach(Model(), Lora(2, 2), ["dwn"])
    with pytest.raises(WrongUse, match="is no regular expression"):
        attach(Model(), Lora(2, 2), ["("])
    with pytest.raises(WrongUse, match="has no plain linears in its blocks"):
        attach(nn.Sequential(nn.Linear(2, 2)).requires_grad_(), Lora(2, 2))
