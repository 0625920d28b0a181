"""Configurations are read in one place: of several parts, with sizes that differ by layer, and with none at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx import configs
from tests.families import FAMILIES

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


class Raising:
    """Whose width raises where it is read, as one that differs between layers does."""

    hidden_size = 24

    @property
    def head_dim(self) -> int:
        raise RuntimeError("which layer's?")


def test_what_is_absent_or_raises_is_none() -> None:
    assert configs.read(Raising(), "head_dim") is None
    assert configs.read(Raising(), "head_dim", "missing", "hidden_size") == 24
    assert configs.number(SimpleNamespace(hidden_size="24", n_embd=True, dim=3), *configs.WIDTHS) == 3
    for size in (configs.vocabulary, configs.hidden, configs.layers, configs.heads, configs.head_width):
        assert size(SimpleNamespace()) is None
    assert configs.positions(SimpleNamespace()) is None
    assert configs.is_causal(SimpleNamespace())


@pytest.mark.parametrize("kind", [name for name in FAMILIES if name not in ("swin", "vit", "wav2vec2")])
def test_sizes_of_text_are_found_in_every_family(kind: str) -> None:
    """Whatever they are called, and in whichever part they are."""
    config = FAMILIES[kind].config()
    assert (configs.vocabulary(config), configs.hidden(config), configs.heads(config)) == (61, 32, 4)
    assert configs.layers(config) == (4 if kind == "gemma3n-text" else 2)
    assert configs.head_width(config) == (None if kind == "gemma4-text" else 8), "heads of some layers are wider"
    assert configs.positions(config) == (None if kind == "mpt" else 32)


def test_what_has_no_text_has_no_vocabulary() -> None:
    config = FAMILIES["vit"].config()
    assert (configs.vocabulary(config), configs.hidden(config)) == (None, 32)


def test_parts_are_configurations_alone() -> None:
    config = FAMILIES["blip-2"].config()
    assert [name for name, _ in configs.parts(config)] == ["vision_config", "qformer_config", "text_config"]
    assert [type(own).__name__ for own in configs.with_parts(config)] == [
        "Blip2Config", "Blip2VisionConfig", "Blip2QFormerConfig", "OPTConfig",
    ]  # fmt: skip
    assert not configs.is_config({"hidden_size": 24})
    assert not configs.is_config(transformers.CLIPConfig)


@pytest.mark.parametrize(("config", "differs"), [
    (lambda: transformers.LlamaConfig(), False),
    (lambda: transformers.MistralConfig(sliding_window=5), True),
    (lambda: transformers.Qwen3Config(layer_types=["full_attention"] * 2, num_hidden_layers=2), False),
    (FAMILIES["llama4"].config, True),  # chunks
    (FAMILIES["jamba"].config, True),  # a state space in some layers
    (FAMILIES["gemma4-text"].config, True),
])  # fmt: skip
def test_attention_that_differs_by_layer_is_told(config: Any, differs: bool) -> None:
    assert configs.attention_differs(config()) is differs


def test_scores_that_are_capped_are_told() -> None:
    assert configs.scores_are_changed(transformers.Gemma2Config(attn_logit_softcapping=50.0))
    assert not configs.scores_are_changed(transformers.LlamaConfig())
    assert configs.named_classes(transformers.LlamaConfig(architectures=["LlamaForCausalLM"])) == ["LlamaForCausalLM"]
    assert configs.named_classes(transformers.LlamaConfig()) == []
