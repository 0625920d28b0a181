"""Attention as models call it: each of their ways leads to one method, whoever answers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.documents import are_starts
from phalanx.kernels.packed_attention import packed_attention

Attend = Callable[..., Any]
"""Attention over queries, keys and values ``[batch, heads, time, width]`` with a mask, or causal.

Where the mask says where documents begin, it is also told which position the first query is.
"""


class Attending(ABC):
    """Answers attention for ranks that share sequences."""

    ranks: int
    rank: int

    @abstractmethod
    def attention(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        *, time: int, draws: bool,
    ) -> Any:  # fmt: skip
        """What ``attend`` gives, in which ``time`` is the dim of it; whether it ``draws``, as for dropout."""

    def reach(self, block: nn.Module) -> None:
        """Have the modules of a block that attend inside of packed documents ask here."""
        for module in block.modules():
            if hasattr(module, "packed_attention"):
                vars(module).update(packed_attention=self.packed_attention)

    def sdpa(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``F.scaled_dot_product_attention``."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        options = {"attn_mask": None, "is_causal": False} | dict(zip(names, args, strict=False)) | kwargs
        query, key, value, mask, causal = (
            options.pop(name) for name in ("query", "key", "value", "attn_mask", "is_causal")
        )

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, first: int = 0) -> Any:
            if are_starts(mask):
                return packed_attention(query, key, value, mask, causal, options.get("scale"), first)
            grouped = {"enable_gqa": True} if query.shape[-3] != key.shape[-3] else {}
            return func(query, key, value, attn_mask=mask, is_causal=causal, **options | grouped)

        return self.attention(attend, query, key, value, mask, causal, time=-2, draws=bool(options.get("dropout_p")))

    def packed_attention(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool = True, scale: float | None = None
    ) -> Any:
        """Attention of positions inside their documents."""
        plain = F.scaled_dot_product_attention
        return self.sdpa(plain, query, key, value, attn_mask=starts, is_causal=causal, scale=scale)
