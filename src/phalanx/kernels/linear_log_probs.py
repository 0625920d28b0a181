"""Log-probabilities of targets under a matrix product that is never whole: a chunk of rows at a time.

What a row's log-probability will be multiplied with is not known in forward, so that backward computes each chunk of
logits once more. Between the two, one number a row is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels import cross_entropy
from phalanx.kernels.linear_cross_entropy import Kind, Product, Vocabulary, added_product, check_ids, over_vocabulary


def linear_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, kind: Kind, vocabulary: Vocabulary | None
) -> Tensor:
    """Of each row of ``hidden``, ``[rows, width]``, its target's; 0 where it is to be ignored."""
    targets = targets.long()
    if not targets.is_cuda:
        size = weight.shape[0] if vocabulary is None else vocabulary.size
        check_ids(targets.where(targets != kind.ignore, 0), size, "target")
    return LinearLogProbs.apply(hidden, weight, bias, targets, kind, vocabulary)


class LinearLogProbs(torch.autograd.Function):
    """Forward keeps the normaliser of each row, by which backward makes its softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        kind: Kind,
        vocabulary: Vocabulary | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found, normaliser = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        valid = targets != kind.ignore
        start, classes = (0, weight.shape[0]) if vocabulary is None else (vocabulary.start, vocabulary.size)
        index = targets - start
        index = index.where(valid & (index >= 0) & (index < weight.shape[0]), -1)
        known = ~valid | ((targets >= 0) & (targets < classes))
        product = _product(weight, bias, wide, vocabulary)
        for part in product.chunks(len(hidden)):
            rows = cross_entropy.statistics(product(hidden[part]), index[part], kind.bending)
            if vocabulary is not None:
                rows = over_vocabulary(rows, vocabulary)
            # a target that there is none of must not go unseen
            normaliser[part] = (rows.top + rows.spread.log()).where(known[part], math.nan)
            found[part] = (rows.chosen - normaliser[part]).where(valid[part], 0)
        ctx.save_for_backward(hidden, weight, bias, index, valid, normaliser)
        ctx.kind, ctx.vocabulary = kind, vocabulary
        return found

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of log-probabilities of lazy logits cannot be differentiated. Make them first: "
                "output.tensor()"
            )
        hidden, weight, bias, index, valid, normaliser = ctx.saved_tensors
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        wide = normaliser.dtype
        grad_hidden = torch.empty_like(hidden) if by_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if by_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if by_bias else None
        product = _product(weight, bias, wide, ctx.vocabulary)
        for part in product.chunks(len(hidden)):
            # of minus the log-probability
            grad = cross_entropy.gradient_(
                product(hidden[part]), index[part], normaliser[part], valid[part], 0.0, 0.0, ctx.kind.bending
            )
            grad = grad.to(wide).mul_(-outer[part].unsqueeze(1))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            narrow = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight = added_product(grad_weight, narrow.T, hidden[part], wide)
        whole = (g if g is None else g.to(hidden.dtype) for g in (grad_hidden, grad_weight, grad_bias))
        return (*whole, None, None, None)


def _product(weight: Tensor, bias: Tensor | None, wide: torch.dtype, vocabulary: Vocabulary | None) -> Product:
    return Product(weight, bias, wide, largest=vocabulary.largest if vocabulary else weight.shape[0])
