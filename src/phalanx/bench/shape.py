"""The model that contenders train: a Llama's shape, on random tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

import phalanx
from phalanx.data import Arrays
from phalanx.errors import WrongUse
from phalanx.models.transformer import Transformer, TransformerConfig

HEAD = 64
CHOSEN = 2
"""Experts that a token goes to."""


@dataclass(frozen=True)
class Shape:
    """By default Llama 3.2 1B's with a head of its own: 1.5 billion weights."""

    layers: int = 16
    width: int = 2048
    length: int = 4096
    batch: int = 4
    vocabulary: int = 128_256
    experts: int = 0
    """In the place of each feed-forward, each as large as it; 0: none."""

    @classmethod
    def default(cls, device: str) -> Shape:
        """What a device trains in a fraction of a second."""
        return cls() if device == "cuda" else cls(layers=4, width=256, length=256, batch=4, vocabulary=4096)

    def changed(self, **given: int | None) -> Shape:
        """With these numbers where they are given."""
        shape = replace(self, **{name: number for name, number in given.items() if number is not None})
        least = {"layers": (2, ", as every model with blocks"), "experts": (CHOSEN, f": each token goes to {CHOSEN}")}
        for name, number in vars(shape).items():
            fewest, why = least.get(name, (1, ""))
            if number < fewest and not (name == "experts" and number == 0):
                raise WrongUse(f"--{name} {number} is too few. Give at least {fewest}{why}.")
        if shape.width % HEAD:
            raise WrongUse(f"--width {shape.width} does not divide into heads of {HEAD}. Make it a multiple of {HEAD}.")
        return shape

    @property
    def heads(self) -> int:
        return self.width // HEAD

    @property
    def kv_heads(self) -> int:
        return self.heads // 4 if self.heads % 4 == 0 else self.heads

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length

    def __str__(self) -> str:
        experts = f" with {self.experts} experts" if self.experts else ""
        return (
            f"{self.layers} blocks of width {self.width}{experts}, vocabulary {self.vocabulary:,}, "
            f"{self.batch} x {self.length} tokens a step"
        )


def transformer(shape: Shape) -> Transformer:
    return Transformer(TransformerConfig(
        vocabulary=shape.vocabulary, width=shape.width, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, hidden=4 * shape.width, rope_base=500_000.0, experts=shape.experts,
        experts_chosen=CHOSEN,
    ))  # fmt: skip


def hugging_face(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.width, "intermediate_size": 4 * shape.width,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.length, "tie_word_embeddings": False, "rope_theta": 500_000.0,
        "use_cache": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    if not shape.experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return MixtralForCausalLM(MixtralConfig(
        **sizes, num_local_experts=shape.experts, num_experts_per_tok=CHOSEN, sliding_window=None
    ))  # fmt: skip


@dataclass
class Llama(phalanx.Task):
    """On random tokens."""

    shape: Shape = Shape()
    hugging_face: bool = False
    global_batch: int = 4
    steps: int = 1000

    counts = "tokens"

    def model(self) -> nn.Module:
        return hugging_face(self.shape) if self.hugging_face else transformer(self.shape)

    def data(self) -> Arrays:
        size = 16 * self.shape.batch, self.shape.length + 1
        return Arrays(tokens=np.random.default_rng(0).integers(0, self.shape.vocabulary, size, dtype=np.int64))

    def inputs(self, batch: dict[str, Any]) -> Any:
        tokens = batch["tokens"][:, :-1]
        return {"input_ids": tokens} if self.hugging_face else tokens

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        logits = output.logits if self.hugging_face else output
        return phalanx.losses.cross_entropy(logits, batch["tokens"][:, 1:], dim=-1)
