"""A byte-level language model on text that ships with Python: its own standard library."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

import phalanx
from phalanx.data import PackedTokens
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.recipes.corpus import standard_library

HELD_OUT_BYTES = 1 << 16


@dataclass
class GPT(phalanx.Task):
    """Predict the next byte of the standard library's source."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    bias: bool = False
    dropout: float = 0.0
    tied: bool = False
    experts: int = 0
    length: int = 128
    megabytes: float = 4.0
    global_batch: int = 16
    steps: int = 200
    learning_rate: float = 2e-3
    warmup_steps: int = 20

    counts = "tokens"

    def model(self) -> nn.Module:
        return Transformer(TransformerConfig(
            vocabulary=256, width=self.width, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads,
            bias=self.bias, dropout=self.dropout, tied=self.tied, experts=self.experts,
        ))  # fmt: skip

    def tiny(self) -> GPT:
        return dataclasses.replace(
            self, width=8 * self.heads, layers=min(self.layers, 2), length=min(self.length, 12), megabytes=0.2
        )

    @cached_property
    def _text(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of the library's files, and where each file ends."""
        files, limit = [], int(self.megabytes * 1e6)
        for path in standard_library():
            if limit > 0:
                files.append(path.read_bytes()[:limit])
                limit -= len(files[-1])
        files = [file for file in files if file]
        return np.frombuffer(b"".join(files), dtype=np.uint8), np.cumsum([len(file) for file in files])

    def _split(self, held_out: bool) -> PackedTokens:
        """Every twentieth file is held out, or the last one of fewer; their beginnings are enough to measure on."""
        tokens, ends = self._text
        if len(ends) < 2:
            raise phalanx.WrongUse(f"megabytes={self.megabytes} is less than two files of text. Set it higher.")
        every = min(20, len(ends))
        starts = np.concatenate([[0], ends[:-1]])
        chosen = [i for i in range(len(ends)) if (i % every == every - 1) == held_out]
        parts = [tokens[starts[i] : ends[i]] for i in chosen]
        if held_out:
            parts = [part[: HELD_OUT_BYTES // len(parts)] for part in parts]
        return PackedTokens(np.concatenate(parts), np.cumsum([len(p) for p in parts]), self.length)

    def data(self) -> PackedTokens:
        return self._split(held_out=False)

    def held_out(self) -> PackedTokens:
        return self._split(held_out=True)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: batch[name] for name in ("tokens", "positions", "documents")}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["targets"], dim=-1)
