"""Heads of language models give lazy logits, whoever wrote the model: a loss computes them in chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.logits import Logits
from phalanx.parallel.forward.wrapper import Instead, wrap


def make_heads_lazy(model: nn.Module, anatomy: Anatomy) -> None:
    """Where what comes after the blocks is a plain product with a vocabulary."""
    for name in anatomy.after:
        head: Any = model.get_submodule(name)
        plain = type(head) is nn.Linear and "forward" not in vars(head)
        if plain and anatomy.splits.get(name) == "vocabulary":
            wrap(head, Instead("lazy logits", _head, head))


def _head(module: nn.Linear, input: Tensor) -> Logits | Tensor:
    if torch.is_autocast_enabled(input.device.type):  # which will be over when logits are made
        return F.linear(input, module.weight, module.bias)
    return Logits(input, module.weight, module.bias)
