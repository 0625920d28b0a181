from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx.layout import Layout
from phalanx.parallel.communication.narrow import Narrow
from phalanx.prove.proof import prove
from phalanx.prove.reference import activations
from phalanx.recipes.gpt import GPT
from tests.tasks import Digits


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_definition_is_what_ranks_do(kind: str) -> None:
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    x[1, 2] = 0
    assert torch.equal(activations.rounded(kind, x), Narrow(kind).rounded(x))


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


def test_a_layout_that_rounds_where_it_should_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "rounded", lambda kind, x: x)
    proof = prove(Stacked(), ["pp=2,activations=bf16"], check=False)
    assert not proof.holds
    finding = proof.results[0].finding
    assert finding is not None
    assert "that rounds as activations=bf16 is defined to" in finding.cause


def test_what_rounds_is_said_in_a_layouts_words() -> None:
    texts = ["dp=2", "dp=2,comm=int4", "pp=2,activations=fp8", "dp=2,pp=2,comm=int8,activations=bf16"]
    assert [activations.rounding(Layout.parse(text)) for text in texts] == [
        "", "comm=int4", "activations=fp8", "comm=int8,activations=bf16",
    ]  # fmt: skip


def test_what_one_device_cannot_round_is_said() -> None:
    proof = prove(Stacked(), ["pp=2,cp=3,activations=bf16"], check=False)
    assert "divided by cp=3, which is no power of two" in proof.results[0].reason
