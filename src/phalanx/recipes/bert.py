"""A masked language model: some tokens are hidden, and an encoder that sees both sides tells which they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import phalanx
from phalanx.data.packing import IGNORE
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.recipes.corpus import Corpus
from phalanx.recipes.hugging_face import from_config

MASK = "[MASK]"
HIDDEN, REPLACED = 0.8, 0.1
"""Of tokens to be told: so many are hidden, so many replaced by any other; the rest is left as it is."""


class Masked:
    """Samples whose tokens are in part hidden; targets are those tokens, and -100 everywhere else.

    Which ones is drawn where the sample is read, by the generators that the loader seeds with (seed, epoch, sample), so
    it is the same at any number of ranks, another one in every epoch, and the same whenever held-out data is read.
    """

    def __init__(self, data: Any, mask: int, vocabulary: int, share: float, kept: int | None = None) -> None:
        self.data, self.mask, self.vocabulary, self.share, self.kept = data, mask, vocabulary, share, kept

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name == "training_order":  # a mixture's own
            return getattr(self.data, name)
        raise AttributeError(name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.data[index]
        tokens = sample["tokens"].numpy()
        chosen = (np.random.random(len(tokens)) < self.share) & (sample["documents"].numpy() >= 0)
        if self.kept is not None:
            chosen &= tokens != self.kept
        fate, others = np.random.random(len(tokens)), np.random.randint(self.vocabulary, size=len(tokens))
        seen = np.where(fate < HIDDEN, self.mask, np.where(fate < HIDDEN + REPLACED, others, tokens))
        return sample | {
            "tokens": torch.from_numpy(np.where(chosen, seen, tokens)),
            "targets": torch.from_numpy(np.where(chosen, tokens, IGNORE)),
        }


@dataclass
class Bert(Corpus):
    """Tell hidden tokens."""

    masked: float = 0.15
    global_batch: int = 16
    steps: int = 300
    learning_rate: float = 2e-3
    warmup_steps: int = 30

    special = (MASK,)

    def check(self) -> None:
        super().check()
        if not 0 < self.masked < 1:
            raise phalanx.WrongUse(f"masked={self.masked} is no share of tokens. Set it between 0 and 1, such as 0.15.")

    def model(self) -> nn.Module:
        if self.config:
            return from_config("masked", self.config, self._ids[1], self.length)
        return Transformer(TransformerConfig(
            vocabulary=self._ids[1], width=self.width, layers=self.layers, heads=self.heads, dropout=self.dropout,
            causal=False,
        ))  # fmt: skip

    @property
    def _ids(self) -> tuple[int, int]:
        """The id that hides a token, and how many ids there are; a tokenizer without such a token gets one more."""
        model = self.known_tokenizer
        own = next((found for name in (MASK, "<mask>") if (found := model.special(name)) is not None), None)
        return (model.vocabulary, model.vocabulary + 1) if own is None else (own, model.vocabulary)

    def _masked(self, data: Any) -> Masked:
        return Masked(data, self._ids[0], self.known_tokenizer.vocabulary, self.masked, self.known_tokenizer.end)

    def data(self) -> Masked:
        return self._masked(super().data())

    def held_out(self) -> Masked:
        return self._masked(super().held_out())

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.config:
            return {"input_ids": batch["tokens"], "attention_mask": (batch["documents"] >= 0).long()}
        return {name: batch[name] for name in ("tokens", "positions", "documents")}

    def evaluate(self, output: Any, batch: dict[str, Any]) -> dict[str, phalanx.Loss]:
        logits, targets = self.logits(output), batch["targets"]
        found = self.by_source(lambda those: phalanx.losses.cross_entropy(logits, those, dim=-1), batch)
        whole = logits.tensor() if isinstance(logits, phalanx.Logits) else logits
        right = ((whole.argmax(-1) == targets) & (targets != IGNORE)).sum()
        return found | {"accuracy": phalanx.Loss(right, (targets != IGNORE).sum())}
