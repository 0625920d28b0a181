"""Causal language models of Hugging Face from tiny configs, as hostile tasks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

import phalanx
from tests.parity import PRIME, HostileLanguage

TOKENS = {"vocab_size": PRIME, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
SIZES = TOKENS | {
    "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 6}),
    "gpt2": ("GPT2Config", TOKENS | {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "mistral": ("MistralConfig", SIZES),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 6}),
    "gpt-neox": ("GPTNeoXConfig", {n: v for n, v in SIZES.items() if n != "num_key_value_heads"}),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4}),
    "bigcode": ("GPTBigCodeConfig", TOKENS | {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "bloom": ("BloomConfig", TOKENS | {"hidden_size": 24, "n_layer": 2, "n_head": 4}),
    "phi3": ("Phi3Config", SIZES),
    "gpt-oss": (
        "GptOssConfig",
        SIZES | {"head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "olmoe": ("OlmoeConfig", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "falcon": ("FalconConfig", TOKENS | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}),
}


NORMS = ("Gemma2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm", "GptOssRMSNorm", "OlmoeRMSNorm")


def config(name: str) -> PretrainedConfig:
    kind, values = CONFIGS[name]
    made = getattr(transformers, kind)(**values)
    made._experts_implementation = "eager"  # grouped products have no float64
    return made


@dataclass
class CausalLanguageModel(HostileLanguage):
    kind: str = "llama"

    def model(self) -> nn.Module:
        model = AutoModelForCausalLM.from_config(config(self.kind))
        for module in model.modules():
            if type(module).__name__ in NORMS:
                module.forward = partial(_normed, module)
        return model

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"input_ids": batch["tokens"]}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["targets"], label_smoothing=0.1, dim=-1)


def _normed(module: Any, x: Tensor) -> Tensor:
    """Their norms in the dtype of their input: as they come they sum in float32, whatever the rest does."""
    shift = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (module.weight + shift)
