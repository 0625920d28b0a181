"""Context parallelism beside training steps: who holds what, and what is refused. (Parity: tests/train.)"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from phalanx.models.transformer import Transformer
from phalanx.prove.reference.activations import round_activations
from phalanx.recipes.gpt import GPT
from tests.parity import (
    TOLERANCE,
    HostileLanguage,
    HostileVision,
    Packed,
    Trace,
    difference,
    reference,
    sent_along,
    spread_run,
)
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


class NarrowValues(nn.Module):
    """Attention whose values are narrower than its keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(width, 8)
        self.out = nn.Linear(8, width)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class WithConvolutions(HostileLanguage):
    def model(self) -> nn.Module:
        return with_attention(super().model(), Convolved(12))


class WithValuesOfTheirOwnWidth(HostileLanguage):
    def model(self) -> nn.Module:
        return with_attention(super().model(), NarrowValues(12))


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


def spread(task: phalanx.Task, layout: str) -> Trace:
    return spread_run(task, Layout.parse(layout))


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (HostileLanguage(), "cp=2,activations=bf16"),
        (Packed(), "cp=4,micro_batch=8,activations=fp8"),
        (HostileLanguage(heads=8, kv_heads=1), "cp=4,cp_kind=ulysses,activations=fp8"),
        (HostileLanguage(heads=4, kv_heads=1), "cp=2,tp=2,recompute=full,activations=fp8"),
        (HostileLanguage(heads=4, kv_heads=1), "cp=2,tp=2,cp_kind=ulysses,activations=bf16"),
        (WithValuesOfTheirOwnWidth(), "cp=2,activations=fp8"),
        (WithValuesOfTheirOwnWidth(), "cp=2,cp_kind=ulysses,activations=fp8"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_in_fewer_bits_it_is_what_one_device_rounds(ranks: Ranks, task: HostileLanguage, text: str) -> None:
    layout = Layout.parse(text)
    expected = reference(
        task, layout.micro_batches(task.global_batch), observe=partial(round_activations, task, layout)
    )
    error, where = difference(ranks(layout.world, spread, task, text)[0], expected)
    assert error < TOLERANCE, where
    assert difference(reference(task), expected)[0] > 1e-3


@pytest.mark.parametrize("kind", ["gather", "ulysses"])
def test_fewer_bytes(ranks: Ranks, kind: str) -> None:
    task = GPT(width=16, layers=2, heads=2, length=8, global_batch=4, megabytes=0.1, steps=2, precision="fp32")
    found = {
        sends: ranks(2, sent_along, "cp", task, f"cp=2,cp_kind={kind},activations={sends}")[0]
        for sends in ("exact", "bf16", "fp8")
    }
    heads = 2 + 2 if kind == "gather" else (2 + 2 + 2 + 2) // 2  # keys and values, or half of all and of the outputs
    rows = 2 * 2 * heads * 4 * 8 // 2  # by layer, forward and back, of a rank's tokens
    assert found["exact"] - found["bf16"] == rows * (4 * 8 - 2 * 8)
    assert found["exact"] - found["fp8"] == rows * (4 * 8 - (8 + 4))
