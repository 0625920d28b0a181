"""Whose features of a projection are whose."""

from __future__ import annotations

from torch import nn

from phalanx.parallel.axes.heads import config_beliefs, head_spans, unclear


def test_heads_of_fused_projections() -> None:
    assert head_spans("qkv_proj", 32, 4, 4, 2) == [((0, 8), (16, 20), (24, 28)), ((8, 16), (20, 24), (28, 32))]
    assert head_spans("query_key_value", 48, 4, 4, 2) == [((0, 24),), ((24, 48),)]
    assert head_spans("k_proj", 4, 4, 4, 2) == [((0, 4),), ((0, 4),)]


def test_what_is_unclear_is_said() -> None:
    assert not unclear("h.qkv_proj", 32, 4, 4, 2)
    assert "has 2 key-value heads beside its queries, which tp=4 does not divide" in unclear("h.qkv_proj", 32, 4, 4, 4)
    words = unclear("h.query_key_value", 24, 4, 4, 2)
    assert words == "h.query_key_value gives 24 features, not query, key and value of 4 heads of 4"
    assert unclear("h.in_proj", 44, 4, 4, 2)


class Config:
    def __init__(self) -> None:
        self.num_attention_heads, self.num_key_value_heads, self.hidden_size = 4, 2, 16


def test_a_configuration_that_attention_reads_says_a_ranks_heads() -> None:
    module = nn.Module()
    assert config_beliefs(module, 4, 2) == {}
    module.config = Config()
    assert config_beliefs(module, 4, 2) == {"num_attention_heads": 2, "num_key_value_heads": 1}
