"""Heads of language models give lazy logits, whoever wrote the model: a loss computes them in chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.logits import Logits
from phalanx.parallel.forward.wrapper import Instead, wrap


def make_heads_lazy(model: nn.Module, anatomy: Anatomy) -> None:
    """Where what comes after the blocks is a plain product with a vocabulary."""
    for name in anatomy.after:
        head: Any = model.get_submodule(name)
        if anatomy.splits.get(name) == "vocabulary" and type(head) is nn.Linear:
            wrap(head, Instead("lazy logits", _head, head))


def _head(module: nn.Linear, x: Tensor) -> Logits:
    return Logits(x, module.weight, module.bias)
