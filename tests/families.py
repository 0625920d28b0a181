"""Tiny models of many of Hugging Face's families, unmodified, as tasks: made of one configuration or of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

import phalanx

WORDS, TIME, SAMPLES = 61, 10, 40
PAD, IMAGE, AUDIO = 1, 60, 59
"""Tokens: of padding, of a picture's place, and of a sound's."""
TOKENS = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = TOKENS | BLOCKS | {"max_position_embeddings": 32}
GROUPED = TEXT | {"num_key_value_heads": 2}
VISION = BLOCKS | {"image_size": 16, "patch_size": 8}
IN_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model's class, its configuration, what a sample of it is, and which outputs the loss is of."""

    model: str
    config: Callable[[], PretrainedConfig]
    sample: Callable[[torch.Generator], Sample]
    outputs: tuple[str, ...] = ("logits",)
    fold: tuple[str, ...] = ()
    """Inputs whose rows are not samples: a sample has several."""


def made(kind: str, **values: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, kind)(**values)


def tokens(draw: torch.Generator, places: int = 0, token: int = IMAGE) -> Tensor:
    """Words, and before them so many places of a picture or a sound."""
    words = torch.randint(3, AUDIO, (TIME,), generator=draw)
    return torch.cat([torch.full((places,), token), words])


def text(draw: torch.Generator) -> Sample:
    return {"input_ids": tokens(draw)}


def picture(draw: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 16, 16, generator=draw)}


def wave(draw: torch.Generator) -> Sample:
    return {"input_values": torch.randn(400, generator=draw)}


def large_picture(draw: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 64, 64, generator=draw)}


def both(draw: torch.Generator) -> Sample:
    return text(draw) | picture(draw)


def question(draw: torch.Generator) -> Sample:
    return picture(draw) | {"input_ids": tokens(draw, 5)}


def patches(draw: torch.Generator) -> Sample:
    """A picture of 4 x 4 patches as Qwen2-VL takes it, of which each 2 x 2 are one token."""
    pixels = torch.randn(16, 3 * 2 * 8 * 8, generator=draw)
    ids = tokens(draw, 4)
    return {
        "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip


def sound(draw: torch.Generator) -> Sample:
    return {
        "input_features": torch.randn(8, 32, generator=draw), "input_ids": tokens(draw, 8, AUDIO),
        "feature_attention_mask": torch.ones(32, dtype=torch.long), "attention_mask": torch.ones(TIME + 8).long(),
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    "bert": Family("BertForMaskedLM", made("BertConfig", **TEXT), text),
    "blip-2": Family(
        "Blip2ForConditionalGeneration",
        made(
            "Blip2Config", vision_config=VISION, qformer_config=TEXT | {"encoder_hidden_size": 32},
            text_config={"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32} | TEXT,
            num_query_tokens=5, image_text_hidden_size=16, image_token_index=IMAGE,
        ),
        question,
    ),
    "clip": Family(
        "CLIPModel", made("CLIPConfig", text_config=TEXT, vision_config=VISION, projection_dim=16), both,
        ("text_embeds", "image_embeds"),
    ),
    "ernie-moe": Family(  # its first block has no experts
        "Ernie4_5_MoeForCausalLM",
        made(
            "Ernie4_5_MoeConfig", **GROUPED, moe_num_experts=4, moe_k=2, moe_intermediate_size=24,
            moe_num_shared_experts=1,
        ),
        text,
    ),
    "esm": Family("EsmForMaskedLM", made("EsmConfig", **TEXT, mask_token_id=3, token_dropout=True), text),
    "galactica": Family(
        "OPTForCausalLM",
        made(
            "OPTConfig", **TEXT, ffn_dim=48, word_embed_proj_dim=32, activation_function="gelu", enable_bias=False,
            layer_norm_elementwise_affine=False,
        ),
        text,
    ),
    "gemma3n-text": Family(
        "Gemma3nForCausalLM",
        made(
            "Gemma3nTextConfig",
            **GROUPED | {"num_hidden_layers": 4, "intermediate_size": [48] * 4}, activation_sparsity_pattern=[0.0] * 4,
            head_dim=8, sliding_window=4, vocab_size_per_layer_input=WORDS, hidden_size_per_layer_input=8,
            num_kv_shared_layers=2, laurel_rank=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ),
        text,
    ),
    "gemma4-text": Family(
        "Gemma4ForCausalLM",
        made(
            "Gemma4TextConfig", **GROUPED, head_dim=8, global_head_dim=16, sliding_window=4,
            layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=WORDS,
            hidden_size_per_layer_input=8,
        ),
        text,
    ),
    "granite-moe-hybrid": Family(
        "GraniteMoeHybridForCausalLM",
        made(
            "GraniteMoeHybridConfig", **GROUPED, **MAMBA, mamba_n_heads=8, mamba_chunk_size=8, num_local_experts=4,
            num_experts_per_tok=2, shared_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        ),
        text,
    ),
    "jamba": Family(
        "JambaForCausalLM",
        made(
            "JambaConfig", **GROUPED, **MAMBA, mamba_dt_rank=4, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
        ),
        text,
    ),
    "jetmoe": Family(
        "JetMoeForCausalLM",
        made(
            "JetMoeConfig", **GROUPED, kv_channels=8, num_local_experts=4, num_experts_per_tok=2,
        ),
        text,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        made(
            "Llama4TextConfig", **GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=4,
            interleave_moe_layer_step=1, attention_chunk_size=8,
        ),
        text,
    ),
    "mpt": Family(
        "MptForCausalLM",
        made("MptConfig", d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=32, vocab_size=WORDS),
        text,
    ),
    "olmoe": Family("OlmoeForCausalLM", made("OlmoeConfig", **GROUPED, num_experts=4, num_experts_per_tok=2), text),
    "opt": Family("OPTForCausalLM", made("OPTConfig", **TEXT, ffn_dim=48, word_embed_proj_dim=32), text),
    "qwen2-audio": Family(
        "Qwen2AudioForConditionalGeneration",
        made(
            "Qwen2AudioConfig",
            audio_config={
                "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
                "num_mel_bins": 8, "max_source_positions": 16,
            },
            text_config={"model_type": "qwen2"} | GROUPED, audio_token_index=AUDIO,
        ),
        sound,
    ),
    "qwen2-vl": Family(
        "Qwen2VLForConditionalGeneration",
        made(
            "Qwen2VLConfig",
            text_config=GROUPED | {"rope_parameters": IN_SECTIONS},
            vision_config={
                "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8,
            },
            image_token_id=IMAGE, video_token_id=58, vision_start_token_id=57, vision_end_token_id=56,
        ),
        patches, fold=("pixel_values", "image_grid_thw"),
    ),
    "siglip": Family(
        "SiglipModel", made("SiglipConfig", text_config=TEXT | {"projection_size": 32}, vision_config=VISION), both,
        ("text_embeds", "image_embeds"),
    ),
    "swin": Family(
        "SwinModel",
        made("SwinConfig", image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        large_picture, ("last_hidden_state",),
    ),
    "vit": Family("ViTModel", made("ViTConfig", **VISION), picture, ("last_hidden_state",)),
    "wav2vec2": Family(
        "Wav2Vec2Model",
        made(
            "Wav2Vec2Config", **BLOCKS, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
            num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.5,
            mask_time_length=2, mask_feature_prob=0.3, mask_feature_length=2, layerdrop=0.0,
        ),
        wave, ("last_hidden_state",),
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        made(
            "XGLMConfig", **TOKENS, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=32,
        ),
        text,
    ),
}  # fmt: skip


class Samples:
    """As many samples as a proof needs, each a function of its number."""

    def __init__(self, sample: Callable[[torch.Generator], Sample]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return self.sample(torch.Generator().manual_seed(index))


@dataclass
class FamilyTask(phalanx.Task):
    """Next tokens where a model has logits of them, else outputs near a fixed wave."""

    kind: str = "bert"
    global_batch: int = 12
    steps: int = 2
    clip: float = 1e9

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    def model(self) -> nn.Module:
        return getattr(transformers, self.family.model)(self.family.config())

    def data(self) -> Samples:
        return Samples(self.family.sample)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        folded = {name: batch[name].flatten(0, 1) for name in self.family.fold}
        return {name: value for name, value in batch.items() if not name.startswith("_")} | folded

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        if self.family.outputs == ("logits",):
            targets = batch["input_ids"].roll(-1, 1)
            return phalanx.losses.cross_entropy(output.logits, targets.where(targets < AUDIO, -100), dim=-1)
        found = [output[name].flatten(1) for name in self.family.outputs]
        rows = torch.cat(found, 1)
        wave = torch.arange(rows.shape[1], device=rows.device).to(rows.dtype).cos()
        return phalanx.Loss((rows - wave).square().mean(1).sum(), len(rows))
