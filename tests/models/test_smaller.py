"""Configurations are made smaller by the names of their fields, and models can be built of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx import configs
from phalanx.models.hugging_face import check_apart, language_model
from phalanx.models.smaller import (
    CHUNK,
    HEAD_WIDTH,
    Sizes,
    folded,
    made_smaller,
    shorter_chunks,
    smaller,
    special_tokens,
    ways,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

SIZES = Sizes(blocks=4, heads=4, vocabulary=131)


def weights(kind: str, config: Any) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in getattr(transformers, kind)(config).parameters())


def test_a_smaller_one_is_of_the_same_kind() -> None:
    config = transformers.Qwen2Config(num_hidden_layers=7, bos_token_id=151643)
    tiny = smaller(config, 2, 4, 131)
    model = language_model(tiny, "causal")
    check_apart(model, "texts", "")
    assert type(model) is transformers.Qwen2ForCausalLM
    assert len(model.model.layers) == 2
    assert sum(weight.numel() for weight in model.parameters()) < 100_000
    assert tiny.bos_token_id < 131
    assert config.num_hidden_layers == 7


@pytest.mark.parametrize(("model", "config"), [
    ("BertForMaskedLM", "BertConfig"),
    ("CLIPModel", "CLIPConfig"),
    ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig"),
    ("EsmForMaskedLM", "EsmConfig"),
    ("Gemma4ForCausalLM", "Gemma4TextConfig"),
    ("JambaForCausalLM", "JambaConfig"),
    ("Llama4ForCausalLM", "Llama4TextConfig"),
    ("Mamba2ForCausalLM", "Mamba2Config"),
    ("MptForCausalLM", "MptConfig"),
    ("OPTForCausalLM", "OPTConfig"),
    ("Qwen2VLForConditionalGeneration", "Qwen2VLConfig"),
    ("SiglipModel", "SiglipConfig"),
    ("T5ForConditionalGeneration", "T5Config"),
    ("ViTModel", "ViTConfig"),
    ("WhisperForConditionalGeneration", "WhisperConfig"),
    ("XGLMForCausalLM", "XGLMConfig"),
])  # fmt: skip
def test_models_of_all_kinds_are_built_of_it(model: str, config: str) -> None:
    """Of their own configurations, which ask for many more weights."""
    made = getattr(transformers, config)(**{"vocab_size": 1000} if config == "EsmConfig" else {})  # it says none
    before = made.to_dict()
    assert weights(model, made_smaller(made, SIZES)) < 3_000_000
    assert made.to_dict() == before


def test_sizes_that_are_equal_stay_so() -> None:
    """Whichever part has them."""
    config = transformers.CLIPConfig(projection_dim=512, text_config={"hidden_size": 512, "projection_dim": 512})
    tiny = made_smaller(config, SIZES)
    assert tiny.projection_dim == tiny.text_config.projection_dim == tiny.text_config.hidden_size == SIZES.width
    assert (tiny.text_config.num_hidden_layers, tiny.vision_config.num_hidden_layers) == (4, 4)
    assert tiny.vision_config.image_size == config.vision_config.image_size, "pictures are as large as the data's"


def test_layers_of_each_kind_are_left() -> None:
    """A setting that is worked out from others, and cannot be set, is worked out anew."""
    jamba = made_smaller(transformers.JambaConfig(), SIZES)
    assert {*jamba.layers_block_type} == {"attention", "mamba"}
    ernie = made_smaller(transformers.Ernie4_5_MoeConfig(), SIZES)
    assert 0 < ernie.moe_layer_start_index < ernie.num_hidden_layers
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = made_smaller(transformers.Gemma3TextConfig(num_hidden_layers=12, layer_types=kinds * 2), SIZES)
    assert len(gemma.layer_types) == gemma.num_hidden_layers == 4
    assert {*gemma.layer_types} == {*kinds}


def test_heads_of_keys_divide_those_of_queries() -> None:
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=32, num_key_value_heads=8)
    tiny = made_smaller(config, SIZES)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.head_dim) == (4, 1, HEAD_WIDTH)
    wide = made_smaller(config, Sizes(blocks=2, heads=8, vocabulary=131, head_width=16))
    assert (wide.num_attention_heads, wide.num_key_value_heads, wide.hidden_size) == (8, 2, 128)


def test_a_way_may_keep_what_another_makes_smaller() -> None:
    config = transformers.LlamaConfig(num_attention_heads=32)
    found = [made_smaller(config, sizes) for sizes in ways(config, blocks=2, heads=4, vocabulary=131)]
    assert len(found) == 5
    assert {own.num_hidden_layers for own in found} == {2}
    assert [own.intermediate_size == config.intermediate_size for own in found] == [False, False, True, False, False]
    assert [own.num_attention_heads for own in found] == [4, 4, 4, 4, 32]


def test_special_tokens_stay_apart() -> None:
    config = transformers.Qwen2VLConfig(
        image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
        text_config={"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 0},
    )  # fmt: skip
    before = special_tokens(config)
    assert {0, 151643, 151645, 151655, 151656} <= {*before}
    becomes = folded(before, 131)
    tiny = made_smaller(config, SIZES)
    assert len({*becomes.values()}) == len(before)
    assert max(becomes.values()) < 131
    assert (tiny.image_token_id, tiny.video_token_id) == (becomes[151655], becomes[151656])
    assert tiny.text_config.eos_token_id == becomes[151645]
    assert folded([3, 4, 5, 6], 3) == {3: 0, 4: 1, 5: 2, 6: 0}, "there are more of them than tokens"


def test_chunks_are_no_longer_than_sequences() -> None:
    config = transformers.Mamba2Config(chunk_size=256)
    assert shorter_chunks(config, 16) == [f"chunk_size 256 -> {CHUNK}"]
    assert config.chunk_size == CHUNK
    assert shorter_chunks(config, 16) == []
    llama = transformers.Llama4Config(text_config={"attention_chunk_size": 8192})
    assert shorter_chunks(llama, 16) == [], "chunks that attention keeps to are no padding"
    assert configs.read(llama.text_config, "attention_chunk_size") == 8192
