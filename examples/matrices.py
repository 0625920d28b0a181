"""A language model whose hidden matrices are updated whole, by SOAP, and all else element by element, by AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import phalanx
from phalanx.recipes.gpt import GPT


@dataclass
class Matrices(GPT):
    width: int = 64
    layers: int = 2
    length: int = 64

    def optimizer(self, params: Any) -> dict[str, torch.optim.Optimizer]:
        hidden = [p for p in params if p.ndim == 2 and p.logical_name.startswith("blocks")]
        rest = [p for p in params if not any(p is other for other in hidden)]
        return {
            "hidden": phalanx.optim.SOAP(hidden, lr=self.learning_rate),
            "rest": torch.optim.AdamW(rest, lr=self.learning_rate, weight_decay=0.0, fused=True),
        }
