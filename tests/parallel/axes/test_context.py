"""Context parallelism beside training steps: who holds what, and what is refused. (Parity: tests/train.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from phalanx.models.transformer import Transformer
from tests.parity import HostileLanguage, HostileVision
from tests.ranks import RankFailed, Ranks


def positions(time: int) -> tuple[list[int], float]:
    """This rank's positions, and the work of causal attention for them."""
    with phalanx.Engine(HostileLanguage(), Layout(cp=4), device="cpu") as engine:
        here = engine.spread.sharding.layout(time).positions
        assert here is not None
        return here.tolist(), float((here + 1).sum())


def test_every_position_once_and_causal_work_is_even(ranks: Ranks) -> None:
    answers = ranks(4, positions, 64)
    assert sorted(place for places, _ in answers for place in places) == list(range(64))
    assert len({work for _, work in answers}) == 1
    assert answers[1][0] == [*range(8, 16), *range(48, 56)]
    short = ranks(4, positions, 3)
    assert sorted(place for places, _ in short for place in places) == [0, 1, 2]


class AttentionByHand(nn.Module):
    """Attention by hand, which nothing can reach."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = width
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return (self.q_proj(x) @ self.k_proj(x).transpose(1, 2)).softmax(-1) @ x


class Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def with_attention(model: nn.Module, attention: nn.Module) -> nn.Module:
    assert isinstance(model, Transformer)
    for block in model.blocks:
        block.attention = attention  # type: ignore[assignment]
    return model


class WithConvolutions(HostileLanguage):
    def model(self) -> nn.Module:
        return with_attention(super().model(), Convolved(12))


class WithAttentionByHand(HostileLanguage):
    def model(self) -> nn.Module:
        return with_attention(super().model(), AttentionByHand(12))


def step(task: phalanx.Task, layout: str) -> None:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        engine.step(next(iter(engine.batches())))


@pytest.mark.parametrize(("task", "layout", "words"), [
    (WithConvolutions(), "cp=2", "blocks.0.attention.conv is a Conv1d, which mixes positions where cp=2"),
    (HostileLanguage(), "cp=4,cp_kind=ulysses", "blocks.0 has 2 heads on each rank, which do not divide by cp=4"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(ranks: Ranks, task: phalanx.Task, layout: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        ranks(Layout.parse(layout).world, step, task, layout)


def test_attention_that_is_not_reached_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"blocks\.0 computes attention where cp=2 cannot reach it"):
        ranks(2, step, WithAttentionByHand(), "cp=2")


def test_a_model_without_time_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="is a Conv2d, which mixes positions where cp=2 cannot reach it"):
        ranks(2, step, HostileVision(), "cp=2")


def cross(layout: str) -> float:
    """Attention to what every rank has whole needs nobody else."""
    with phalanx.Engine(HostileLanguage(), Layout.parse(layout), device="cpu") as engine:
        context = engine.spread.context
        assert context is not None
        layout = engine.spread.sharding.layout(8)
        engine.spread.activations.enter(layout)
        context.inside = "blocks.0"
        assert layout.positions is not None
        torch.manual_seed(0)
        whole = torch.randn(1, 2, 8, 4)
        key = torch.randn(1, 2, 5, 4)
        query = whole[:, :, layout.positions]
        found = context.sdpa(F.scaled_dot_product_attention, query, key, key)
        expected = F.scaled_dot_product_attention(whole, key, key)[:, :, layout.positions]
        return float((found - expected).abs().max())


def test_attention_to_other_sequences(ranks: Ranks) -> None:
    assert max(ranks(2, cross, "cp=2")) < 1e-6
