"""Which weights are cut and where, and what is refused by name and number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx import Anatomy, WrongUse
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.axes.cuts import Cut, Plan, make_plan
from phalanx.parallel.weights.blueprint import Blueprint


def plan(model: nn.Module, ranks: int, **rules: object) -> Plan:
    described = Blueprint(lambda: model, 0).model
    return make_plan(described, Anatomy.of(described, **rules), ranks)


class Wordless(nn.Module):
    """Attention that does not say how wide its heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))


class WordlessBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Wordless()


class Plain(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))


def test_what_does_not_divide_is_refused_by_name_and_number() -> None:
    model = Transformer(TransformerConfig(width=24, heads=6, kv_heads=6, layers=2))
    with pytest.raises(WrongUse, match=r"blocks\.0\.attention has 6 heads, which do not divide by tp=4.*such as tp=3"):
        plan(model, 4)
    model = Transformer(TransformerConfig(width=24, heads=12, kv_heads=3, layers=2))
    with pytest.raises(WrongUse, match=r"k_proj has 3 key-value heads and tp=2: neither divides.*such as tp=1"):
        plan(model, 2)
    with pytest.raises(WrongUse, match=r"tp=2 finds nothing to cut in Plain.*Give rules in Task.anatomy"):
        plan(Plain(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))), 2)


def test_a_heads_width_is_no_count_of_heads_though_it_be_the_same_number() -> None:
    found = plan(Transformer(TransformerConfig(width=64, heads=8, kv_heads=8, layers=2)), 4)
    assert found.containers["blocks.0.attention"].attributes == {}


def test_where_it_is_unclear_whose_features_are_whose_columns_are_gathered() -> None:
    found = plan(Plain(WordlessBlock), 2)
    assert "does not say how wide its heads are" in found.containers["layers.0.attention"].gathered
    assert found.cuts["layers.0.attention.q_proj.weight"].spans == (((0, 4),), ((4, 8),))


class Pooled(nn.Module):
    """Tokens pooled by torch's attention, which reads its projection's weight and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(WordlessBlock() for _ in range(2))
        self.pool = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 8)


def test_a_projection_that_is_never_called_is_whole() -> None:
    """Though it is as wide as a vocabulary."""
    assert {*plan(Pooled(), 2).vocabulary} == {"words", "head"}


def test_the_residual_stream_is_cut_by_time_only_where_nothing_else_mixes_tokens() -> None:
    model = Transformer(TransformerConfig(width=8, heads=2, layers=2))
    assert plan(model, 2).sequence_parallel
    model.blocks[1].mixer = nn.Conv1d(8, 8, 3)
    assert not plan(model, 2).sequence_parallel


def test_parts_make_the_whole() -> None:
    whole = torch.randn(12, 5)
    cut = Cut(0, (((0, 2), (6, 8)), ((2, 6), (8, 12))))
    again = torch.empty_like(whole)
    for rank in range(2):
        part = cut.take(whole, rank)
        assert part.shape == cut.shape(whole.shape, rank)
        cut.put(part, again, rank)
    assert torch.equal(again, whole)
    assert cut.sharers(0) == [0]
    assert Cut(0, (((0, 2),), ((0, 2),), ((2, 4),))).sharers(1) == [0, 1]
