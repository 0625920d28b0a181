"""Losses that are ready: sums, and how many terms they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from phalanx.errors import WrongUse
from phalanx.logits import Logits
from phalanx.loss import Loss, sum

__all__ = [
    "Logits", "Loss", "binary_cross_entropy", "cross_entropy", "divergence", "log_probs",
    "mean_squared_error", "penalised", "penalty_factor", "sum",
]  # fmt: skip


class _Penalised(torch.autograd.Function):
    """Passes ``x`` on, and gives the penalty the gradient that the loss's total has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:
        ctx.save_for_backward(penalty)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (penalty,) = ctx.saved_tensors
        return gradient, _penalty_slope(gradient, penalty)


@custom_op("phalanx::penalty_slope", mutates_args=(), schema="(Tensor gradient, Tensor penalty) -> Tensor")
def _penalty_slope(gradient: Tensor, penalty: Tensor) -> Tensor:
    """An operator, since a compiler would take the factor of its own time; and not before there is a ``gradient``."""
    return torch.full_like(penalty, _penalty_factor)


@_penalty_slope.register_fake
def _(gradient: Tensor, penalty: Tensor) -> Tensor:
    return torch.empty_like(penalty)


_penalty_factor = 1.0


@contextmanager
def penalty_factor(factor: float) -> Iterator[None]:
    """While a backward runs: what the loss's total is multiplied by, and penalties with it."""
    global _penalty_factor
    outer, _penalty_factor = _penalty_factor, factor
    try:
        yield
    finally:
        _penalty_factor = outer


def penalised(x: Tensor, penalty: Tensor) -> Tensor:
    """``x``, with a penalty bound to it that is minimised along with the loss.

    The penalty is a sum over a batch's terms, like a loss's total, and must not depend on which samples are computed
    together. It shows in the gradients, not in the loss that is reported.
    """
    return _Penalised.apply(x, penalty)


def cross_entropy(
    output: Tensor | Logits, targets: Tensor, *, ignore: int = -100, label_smoothing: float = 0.0
) -> Loss:
    """Cross-entropy summed over all targets but those equal to ``ignore``, and how many those are.

    Classes are the last dim of ``output``, ``[batch, time, classes]``, or its second, ``[batch, classes, y, x]``.
    Targets that are real numbers, ``[..., classes]``, are the probability of each class.
    """
    if targets.is_floating_point():
        return _soft_cross_entropy(output, targets, label_smoothing)
    count = (targets != ignore).sum()
    if isinstance(output, Logits) and output.lazy:
        if output.shape[:-1] != targets.shape:
            raise _mismatch(output.shape, targets.shape)
        return Loss(output.cross_entropy(targets, ignore, label_smoothing), count)
    logits = output.tensor() if isinstance(output, Logits) else output
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.shape[:-1] == targets.shape:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    elif logits.shape[:1] + logits.shape[2:] != targets.shape:
        raise _mismatch(logits.shape, targets.shape)
    total = F.cross_entropy(logits, targets, ignore_index=ignore, label_smoothing=label_smoothing, reduction="sum")
    return Loss(total, count)


def _soft_cross_entropy(output: Tensor | Logits, targets: Tensor, smoothing: float) -> Loss:
    if output.shape[:-1] == targets.shape:
        raise WrongUse(
            f"the targets are {targets.dtype} of shape {tuple(targets.shape)}, one for each row of the output: as "
            "classes they must be whole numbers. Write targets.long()."
        )
    if output.shape != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    logits = output.tensor() if isinstance(output, Logits) else output
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    wanted = targets.reshape(logits.shape).to(logits.dtype)
    total = F.cross_entropy(logits, wanted, label_smoothing=smoothing, reduction="sum")
    return Loss(total, len(logits))


def log_probs(output: Tensor | Logits, targets: Tensor, *, ignore: int = -100) -> Tensor:
    """The log-probability of each sequence: summed over its targets, ``[batch, time]``, but those equal to ``ignore``.

    Not a loss yet: what preferences between sequences are made of.
    """
    if output.shape[:-1] != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    if isinstance(output, Logits) and output.lazy:
        return output.log_probs(targets, ignore)
    logits = output.tensor() if isinstance(output, Logits) else output
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    rows = F.cross_entropy(logits, targets.flatten(), ignore_index=ignore, reduction="none")
    return -rows.view(targets.shape).sum(-1)


def divergence(
    output: Tensor | Logits, goal: Tensor | Logits, counted: Tensor, *, reverse: bool = False, temperature: float = 1.0
) -> Loss:
    """How far predictions, ``[..., classes]``, are from another model's: summed where ``counted``, and how many.

    KL(goal || output), or with ``reverse`` KL(output || goal), of logits that are divided by ``temperature``. The goal
    gets no gradient.
    """
    if output.shape != goal.shape or output.shape[:-1] != counted.shape:
        raise WrongUse(
            f"logits of shape {tuple(output.shape)} are to be held against others of {tuple(goal.shape)} where "
            f"{tuple(counted.shape)} count: they do not belong together. Use models with one vocabulary."
        )
    warm, other = output / temperature, goal / temperature
    if isinstance(warm, Logits) and isinstance(other, Logits) and warm.meets(other):
        return Loss(warm.divergence(other, counted, reverse), counted.sum())
    logs, wanted = (_log_softmax(each) for each in (warm, other))
    one, two = (logs, wanted.detach()) if reverse else (wanted.detach(), logs)
    rows = (one.exp() * (one - two)).sum(-1)
    return Loss(rows.where(counted, 0).sum(), counted.sum())


def _log_softmax(logits: Tensor | Logits) -> Tensor:
    logits = logits.tensor() if isinstance(logits, Logits) else logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def mean_squared_error(output: Tensor, targets: Tensor) -> Loss:
    """Squared differences, summed, and how many there are."""
    if output.shape != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    wide = torch.promote_types(output.dtype, torch.float32)
    return Loss((output.to(wide) - targets.to(wide)).square().sum(), targets.numel())


def binary_cross_entropy(output: Tensor, targets: Tensor) -> Loss:
    """Cross-entropy of yes-or-no logits, summed, and how many there are."""
    if output.shape != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    wide = torch.promote_types(output.dtype, torch.float32)
    total = F.binary_cross_entropy_with_logits(output.to(wide), targets.to(wide), reduction="sum")
    return Loss(total, targets.numel())


def _mismatch(output: torch.Size, targets: torch.Size) -> WrongUse:
    if output == targets:
        return WrongUse(
            f"the targets have the shape of the output, {tuple(output)}, and are whole numbers: as the probability of "
            "each class they must be real. Write targets.float(), or give the class alone: targets.argmax(-1)."
        )
    return WrongUse(
        f"the model's output has shape {tuple(output)} and the targets {tuple(targets)}: they do not belong together. "
        "Check what Task.loss passes to the loss."
    )
