"""Log-probabilities of targets under a matrix product that is never whole: a chunk of rows at a time.

What a row's log-probability will be multiplied with is not known in forward, so that backward computes each chunk of
logits once more. Between the two, one number a row is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels import cross_entropy
from phalanx.kernels.linear_cross_entropy import Kind, Product, ProductGradients, Vocabulary, as_classes, normalised


def linear_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, kind: Kind, vocabulary: Vocabulary | None
) -> Tensor:
    """Of each row of ``hidden``, ``[rows, width]``, its target's; 0 where it is to be ignored."""
    targets = as_classes(targets, weight, kind, vocabulary)
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
        valid, index = torch.empty_like(targets, dtype=torch.bool), torch.empty_like(targets)
        product = Product.of(weight, bias, wide, vocabulary)
        for part in product.chunks(len(hidden)):
            logits = product(hidden[part])
            valid[part], index[part], rows, normaliser[part] = normalised(logits, targets[part], kind, vocabulary)
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
        wide, made = normaliser.dtype, ProductGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        product = Product.of(weight, bias, wide, ctx.vocabulary)
        for part in product.chunks(len(hidden)):
            # of minus the log-probability
            grad = cross_entropy.gradient_(
                product(hidden[part]), index[part], normaliser[part], valid[part], 0.0, 0.0, ctx.kind.bending
            )
            made.add(part, grad.to(wide).mul_(-outer[part].unsqueeze(1)))
        whole = (g if g is None else g.to(hidden.dtype) for g in made.taken())
        return (*whole, None, None, None)
