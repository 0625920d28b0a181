"""Attention of sequences laid end to end, one after another: what kernels of variable lengths must give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """As `kernels.varlen` has it; ``causal``: the last query of a sequence sees its last key."""
    found, ends_q, ends_k = [], cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        assert 0 <= q1 - q0 <= longest_q
        assert 0 <= k1 - k0 <= longest_k
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device)
        mask = mask.tril(k1 - k0 - (q1 - q0)) if causal else mask
        if q1 > q0:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
            found.append(out.transpose(0, 1))
    return torch.cat(found)


def as_torchs_kernel() -> torch.library.Library:
    """Have processors compute what ``varlen_attn`` of torch's becomes, for as long as this is kept."""
    library = torch.library.Library("aten", "IMPL")

    def forward(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *more: Any, **how: Any) -> Any:
        out = torch.empty_like(query)
        for q, k, v, o, mask in _each(query, key, value, out, cu_q, cu_k, more[3]):
            o.copy_(_weights(q, k, mask, how.get("scale")) @ _shared(v, q))
        nothing = torch.empty(2, dtype=torch.uint64)
        return out, query.new_empty(query.shape[1], len(query)), nothing, nothing, out.new_empty(0)

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor, cu_k: Tensor,
        *more: Any, scale: float | None = None, **how: Any,
    ) -> Any:  # fmt: skip
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        given = _each(query, key, value, grad, cu_q, cu_k, more[3])
        for (q, k, v, do, mask), (dq, dk, dv, _, _) in zip(
            given, _each(*grads, grad, cu_q, cu_k, more[3]), strict=True
        ):
            weights, factor = _weights(q, k, mask, scale), q.shape[-1] ** -0.5 if scale is None else scale
            of_weights = do @ _shared(v, q).mT
            of_scores = factor * weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
            dq.copy_(of_scores @ _shared(k, q))
            dk.copy_((of_scores.mT @ q).unflatten(0, (len(k), -1)).sum(1))
            dv.copy_((weights.mT @ do).unflatten(0, (len(v), -1)).sum(1))
        return tuple(grads)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


def _each(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool
) -> Iterator[tuple[Tensor, ...]]:
    """Of every sequence that has queries, by heads: views, and which keys are seen."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        seen = mask.tril(k1 - k0 - (q1 - q0)) if causal else mask
        if q1 > q0:
            parts = query[q0:q1], key[k0:k1], value[k0:k1], out[q0:q1]
            yield *(x.transpose(0, 1) for x in parts), seen


def _shared(keys: Tensor, query: Tensor) -> Tensor:
    return keys.repeat_interleave(len(query) // len(keys), 0)


def _weights(query: Tensor, key: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    scores = query @ _shared(key, query).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)
