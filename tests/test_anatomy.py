"""Anatomy: what is read off a model, from rules, from Hugging Face's plans, and by looking."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx import Anatomy, WrongUse
from phalanx.models.resnet import ResNet
from phalanx.models.transformer import Transformer, TransformerConfig


def units(anatomy: Anatomy) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.weights for unit in anatomy.units}


def every_weight_once(model: nn.Module, anatomy: Anatomy) -> None:
    named = [weight for unit in anatomy.units for weight in unit.weights]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())


def test_a_transformer_is_read_by_structure() -> None:
    model = Transformer(TransformerConfig(layers=3, tied=True))
    anatomy = Anatomy.of(model)
    assert anatomy.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert anatomy.before == ("embedding", "dropout")
    assert anatomy.after == ("norm", "head")
    assert anatomy.tied == {"head.weight": "embedding.weight"}
    assert anatomy.cuts == anatomy.blocks
    assert anatomy.sources == {"blocks": "detection", "splits": "detection", "cuts": "detection", "experts": "none"}
    assert anatomy.splits["blocks.0.attention.q_proj"] == "column"
    assert anatomy.splits["blocks.2.feed_forward.down_proj"] == "row"
    assert anatomy.splits["embedding"] == anatomy.splits["head"] == "vocabulary"
    tied = next(unit for unit in anatomy.units if unit.place == "tied")
    assert tied.modules == ("embedding", "head")
    every_weight_once(model, anatomy)


def test_blocks_of_several_widths_are_one_kind() -> None:
    model = ResNet(widths=(4, 8), depth=2)
    anatomy = Anatomy.of(model)
    assert anatomy.blocks == tuple(f"blocks.{i}" for i in range(4))
    assert anatomy.before == ("stem",)
    assert anatomy.after == ("head",)
    every_weight_once(model, anatomy)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16) for _ in range(2))


def test_two_stacks_are_both_found_and_are_no_single_chain() -> None:
    model = EncoderDecoder()
    anatomy = Anatomy.of(model)
    assert anatomy.blocks == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    assert anatomy.cuts == ()
    assert units(anatomy)[""] == ("scale",)
    every_weight_once(model, anatomy)


def test_plain_layers_in_a_list_are_blocks_and_a_lone_layer_is_none() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert Anatomy.of(model).blocks == ("0", "2")
    alone = nn.Linear(4, 2)
    assert Anatomy.of(alone).blocks == ()
    assert units(Anatomy.of(alone)) == {"": ("weight", "bias")}


def test_rules_of_the_task_come_first() -> None:
    model = EncoderDecoder()
    anatomy = Anatomy.of(model, blocks="encoder.*", splits={"*.linear1": "column"}, cuts="encoder.1", experts="decoder")
    assert anatomy.blocks == ("encoder.0", "encoder.1")
    assert anatomy.cuts == ("encoder.1",)
    assert set(anatomy.splits) == {f"{stack}.{i}.linear1" for stack in ("encoder", "decoder") for i in (0, 1)}
    assert set(anatomy.sources.values()) == {"task"}
    every_weight_once(model, anatomy)
    with pytest.raises(WrongUse, match="matches no module"):
        Anatomy.of(model, blocks="layers.*")


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(10, 4), nn.Embedding(12, 4)
        self.norm, self.top = nn.LayerNorm(4), nn.Linear(4, 1)


def test_splits_that_have_no_effect_are_known_or_refused() -> None:
    anatomy = Anatomy.of(Recommender(), splits={"user": "vocabulary", "top": "column"})
    assert anatomy.idle_splits == {"user": "vocabulary", "top": "column"}
    with pytest.raises(WrongUse, match=r"matches no module with a matrix to split \(LayerNorm\). Name a linear"):
        Anatomy.of(Recommender(), splits={"norm": "column"})
    model = EncoderDecoder()
    halves = Anatomy.of(model, blocks="encoder.*", splits={"*.linear1": "column"})
    assert set(halves.idle_splits) == set(halves.splits)
    pairs = Anatomy.of(model, blocks="encoder.*", splits={"encoder.*.linear1": "column", "encoder.*.linear2": "row"})
    assert pairs.idle_splits == {}
    assert Anatomy.of(Transformer(TransformerConfig(vocabulary=31))).idle_splits == {}


def test_hugging_face_plans_come_before_detection() -> None:
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    anatomy = Anatomy.of(model)
    assert anatomy.sources["blocks"] == anatomy.sources["splits"] == "hugging face"
    assert anatomy.blocks == ("model.layers.0", "model.layers.1")
    assert anatomy.splits["model.layers.1.self_attn.q_proj"] == "column"
    assert anatomy.splits["model.layers.0.mlp.down_proj"] == "row"
    assert anatomy.splits["lm_head"] == "vocabulary"
    assert anatomy.before == ("model.embed_tokens",)
    assert "lm_head" in anatomy.after
    assert anatomy.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    every_weight_once(model, anatomy)


class Placed(nn.Module):
    """Words and positions, and a layer that is as wide as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(8, 16), "fc2": nn.Linear(16, 8)}) for _ in range(2))
        self.pool, self.head = nn.Linear(8, 12), nn.Linear(8, 20)


def test_positions_are_no_vocabulary() -> None:
    """Models ask the weight how many positions there are."""
    splits = Anatomy.of(Placed()).splits
    assert [name for name, way in splits.items() if way == "vocabulary"] == ["token_embedding", "head"]
