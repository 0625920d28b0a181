"""Attention of sequences of any length, laid end to end: torch's own, whose arguments differ from version to version.

To import it takes seconds: it loads the compiler.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""From torch 2.13 on it wants to be told that heads share keys; before, it only does so."""
EVERYWHERE, BACK = (-1, -1), (-1, 0)
"""Windows: how far sequences look back and ahead, -1: as far as they reach."""


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """Of ``[tokens, heads, width]``; ``causal``: the last query of a sequence sees its last key."""
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if GROUPED else {}
    window = BACK if causal else EVERYWHERE
    return varlen_attn(query, key, value, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=window, **grouped)  # type: ignore[return-value]
