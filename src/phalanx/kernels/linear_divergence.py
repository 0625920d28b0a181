"""How far the softmax of one matrix product is from that of another, neither of them ever whole.

A chunk of rows at a time, as the cross-entropy of a product does; the other product gets no gradient. Ranks that share
a vocabulary come to terms about each row's normalisers and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.cross_entropy import Bending
from phalanx.kernels.linear_cross_entropy import Product, ProductGradients, Vocabulary


@dataclass(frozen=True)
class LinearHead:
    """A product that logits are made by, and what becomes of them."""

    weight: Tensor
    bias: Tensor | None
    bending: Bending
    vocabulary: Vocabulary | None

    def product(self, wide: torch.dtype) -> Product:
        return Product.of(self.weight, self.bias, wide, self.vocabulary)


def linear_divergence(
    hidden: Tensor, head: LinearHead, others: Tensor, other: LinearHead, counted: Tensor, reverse: bool
) -> Tensor:
    """Summed over the rows that are ``counted``: of KL(other || own), or with ``reverse`` of KL(own || other)."""
    return LinearDivergence.apply(
        hidden, head.weight, head.bias, head, others.detach(), other, counted, reverse, torch.is_grad_enabled()
    )


class LinearDivergence(torch.autograd.Function):
    """The gradients are formed in forward, while a chunk's logits are at hand, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: LinearHead,
        others: Tensor,
        other: LinearHead,
        counted: Tensor,
        reverse: bool,
        recorded: bool,
    ) -> Tensor:
        """``recorded``: whether a backward may come."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needed = [recorded and each for each in ctx.needs_input_grad[:3]]
        total, made = torch.zeros((), dtype=wide, device=hidden.device), ProductGradients(hidden, weight, bias, needed)
        own, theirs = head.product(wide), other.product(wide)
        for part in own.chunks(len(hidden)):
            bent = head.bending(own(hidden[part]).to(wide))
            logs = _normalised(bent, head.vocabulary)
            goal = _normalised(other.bending(theirs(others[part]).to(wide)), other.vocabulary)
            rows, grad = _rows(logs, goal, reverse, head.vocabulary)
            total += rows.where(counted[part], 0).sum()
            if any(needed):
                made.add(part, (grad * head.bending.slope(bent)).where(counted[part].unsqueeze(1), 0))
        ctx.save_for_backward(*made.taken())
        ctx.narrow = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of a divergence of lazy logits cannot be differentiated. Make them first: output.tensor()"
            )
        found = (g if g is None else (g * outer).to(ctx.narrow) for g in ctx.saved_tensors)
        return (*found, None, None, None, None, None, None)


def _normalised(logits: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Log-probabilities, of a rank's part of the vocabulary."""
    if vocabulary is None:
        return logits.log_softmax(1)
    least = torch.finfo(logits.dtype).min
    top = logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), least)
    vocabulary.all_reduce_max(top)
    spread = (logits - top.unsqueeze(1)).exp().sum(1)
    vocabulary.all_reduce(spread)
    return logits - (top + spread.log()).unsqueeze(1)


def _rows(logs: Tensor, goal: Tensor, reverse: bool, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """The divergence of each row, and its gradient by the logits that ``logs`` were made of."""
    if reverse:
        terms = logs.exp() * (logs - goal)
        rows = terms.sum(1)
        if vocabulary is not None:
            vocabulary.all_reduce(rows)
        return rows, terms - logs.exp() * rows.unsqueeze(1)
    rows = (goal.exp() * (goal - logs)).sum(1)
    if vocabulary is not None:
        vocabulary.all_reduce(rows)
    return rows, logs.exp() - goal.exp()
