from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.data.by_length import LengthOrder
from phalanx.data.order import Order
from phalanx.layout import Layout
from phalanx.prove.proof import prove
from phalanx.prove.reference import activations, rounded
from phalanx.prove.results import EQUAL
from phalanx.recipes.gpt import GPT
from tests.tasks import Digits

CHUNKED = {
    "cp=2,activations=bf16": True,
    "cp=2,cp_kind=ulysses,activations=bf16": False,
    "tp=2,activations=bf16": False,
    "cp=2": False,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = (
            nn.Linear(4, 16),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Stacked(Digits):
    def model(self) -> nn.Module:
        return Stack()


def test_stages_train_as_one_device_says_they_do() -> None:
    layouts = ["pp=2,schedule=zb,activations=fp8", "pp=2,activations=bf16", "pp=2,dp=2,activations=fp8,comm=int4"]
    proof = prove(Stacked(), layouts, check=False)
    assert proof.holds, str(proof)


@pytest.mark.every
def test_experts_train_as_one_device_says_they_do() -> None:
    layouts = ["fsdp=2,ep=2,activations=bf16", "fsdp=2,ep=2,activations=fp8"]
    proof = prove(GPT(experts=4), layouts, check=False)
    assert proof.holds, str(proof)


def test_parts_of_layers_train_as_one_device_says_they_do() -> None:
    proof = prove(GPT(layers=2, heads=2, kv_heads=1, dropout=0.1), ["tp=2,activations=fp8"], check=False)
    assert proof.holds, str(proof)


@pytest.mark.every
@pytest.mark.parametrize("experts", [0, 4])
def test_so_do_several_axes_at_once(experts: int) -> None:
    layouts = ["tp=2,cp=2,activations=fp8", "tp=2,cp=2,cp_kind=ulysses,recompute=full,activations=bf16"]
    if experts:
        layouts += ["fsdp=2,ep=2,cp=2,activations=fp8"]
    else:
        layouts += ["dp=2,cp=2,comm=int4,activations=fp8", "tp=2,pp=2,schedule=zb,activations=fp8"]
        layouts += ["cp=4,exact=8,activations=bf16"]
    proof = prove(GPT(kv_heads=1, bias=True, dropout=0.2, experts=experts), layouts, check=False)
    assert proof.holds, str(proof)


class OfTwoHeads(nn.Module):
    """Attention that has its number of heads in its code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = width // 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            linear(x).view(batch, time, 2, width // 2).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))


class Fixed(GPT):
    def model(self) -> nn.Module:
        made = super().model()
        for block in made.blocks:
            block.attention = OfTwoHeads(self.width)
        return made


@pytest.mark.every
def test_what_shows_on_ranks_alone_is_not_proven() -> None:
    proof = prove(Fixed(heads=2), ["tp=2,activations=bf16", "tp=2"], check=False)
    refused, works = proof.results
    assert "the code of blocks.0.attention fixes sizes" in refused.reason
    assert "one device does not round as activations=bf16 does" in refused.reason
    assert works.verdict == EQUAL


def test_samples_that_are_computed_together_are_as_long_as_the_longest() -> None:
    assert [activations.chunked(Layout.parse(text)) for text in CHUNKED] == list(CHUNKED.values())
    orders = (Order(8, 8), LengthOrder(8, 8, lengths=np.array([9, 1, 1, 1, 1, 1, 1, 1])))
    for text, number in {"dp=2,cp=2,micro_batch=2": 4, "cp=2,micro_batch=2": 4, "cp=2,exact=8": 8}.items():
        layout = Layout.parse(f"{text},activations=bf16")
        for order in orders:
            found = sorted(activations.shares(layout, order, np.arange(8)))
            assert len(found) == number
            assert [slot for start, stop in found for slot in range(start, stop)] == list(range(8))


def test_a_layout_that_rounds_where_it_should_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "rounded", lambda kind, x: x)
    proof = prove(Stacked(), ["pp=2,activations=bf16"], check=False)
    assert not proof.holds
    finding = proof.results[0].finding
    assert finding is not None
    assert "that rounds as activations=bf16 is defined to" in finding.cause


def test_what_rounds_is_said_in_a_layouts_words() -> None:
    texts = ["dp=2", "dp=2,comm=int4", "tp=2,activations=fp8", "dp=2,cp=2,comm=int8,activations=bf16"]
    assert [activations.rounding(Layout.parse(text)) for text in texts] == [
        "", "comm=int4", "activations=fp8", "comm=int8,activations=bf16",
    ]  # fmt: skip


def test_what_one_device_cannot_round_is_said() -> None:
    proof = prove(Stacked(), ["pp=2,cp=3,activations=bf16"], check=False)
    assert "divided by cp=3, which is no power of two" in proof.results[0].reason
