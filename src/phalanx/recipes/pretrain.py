"""Pretraining a causal language model on token files, from one source or several by weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

import phalanx
from phalanx.models.hugging_face import check_apart
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.recipes.corpus import Corpus
from phalanx.recipes.hugging_face import from_config


@dataclass
class Pretrain(Corpus):
    """Predict the next token."""

    kv_heads: int = 2
    tied: bool = False
    experts: int = 0
    global_batch: int = 16
    steps: int = 200
    learning_rate: float = 2e-3
    warmup_steps: int = 20

    def model(self) -> nn.Module:
        vocabulary = self.known_tokenizer.vocabulary
        if self.config:
            model = from_config("causal", self.config, vocabulary, self.length)
            check_apart(model, "documents", "Set config to that of another model, such as a Llama.")
            return model
        return Transformer(TransformerConfig(
            vocabulary=vocabulary, width=self.width, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads,
            dropout=self.dropout, tied=self.tied, experts=self.experts,
        ))  # fmt: skip

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.config:
            return {"input_ids": batch["tokens"], "position_ids": batch["positions"]}
        return {name: batch[name] for name in ("tokens", "positions", "documents")}

    def evaluate(self, output: Any, batch: dict[str, Any]) -> dict[str, phalanx.Loss]:
        logits = self.logits(output)
        return self.by_source(lambda targets: phalanx.losses.cross_entropy(logits, targets, dim=-1), batch)
