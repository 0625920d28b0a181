"""Losses that are ready, each a sum and how many terms it has: those of torch, Dice and focal losses.

Total over count is the mean that torch gives, over the global batch of any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from phalanx.class_dims import check_same_shape, class_dim, class_weights, mismatch, widened
from phalanx.dice import binary_dice, dice
from phalanx.errors import WrongUse
from phalanx.logits import Logits
from phalanx.loss import Loss, sum

__all__ = [
    "Logits", "Loss", "binary_cross_entropy", "binary_dice", "binary_focal", "cross_entropy", "dice", "divergence",
    "focal", "huber", "kl_div", "l1", "log_probs", "mean_squared_error", "penalised", "penalty_factor", "smooth_l1",
    "sum",
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
    output: Tensor | Logits,
    targets: Tensor,
    *,
    weight: Tensor | Sequence[float] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dim: int | None = None,
) -> Loss:
    """Cross-entropy of scores and classes: total over count is what `torch.nn.functional.cross_entropy` gives.

    Classes are dim 1 of ``output``, as in torch: ``[batch, classes]``, ``[batch, classes, y, x]``, or ``[classes]``.
    Any other dim is asked for: ``dim=-1`` for a language model's ``[batch, time, classes]``. Of `Logits`, which heads
    of language models give, classes are the last dim.

    ``targets`` are whole numbers, the class at each place, or real numbers of the output's shape, the probability of
    each class. ``weight``: of each class. Targets that are ``ignore_index`` do not count. The count is that of
    targets, or the sum of their weights; of probabilities it is the number of places, as in torch.
    """
    place = class_dim(output, targets, dim)
    if targets.is_floating_point() and ignore_index >= 0:
        raise WrongUse(f"ignore_index={ignore_index} is for classes, and the targets are probabilities. Leave it out.")
    last, classes = place == output.ndim - 1, output.shape[place]
    if not targets.is_floating_point():
        targets = targets.long()
        if isinstance(output, Logits) and output.lazy and last and not (weight is not None and label_smoothing):
            return _lazy_cross_entropy(output, targets, weight, ignore_index, label_smoothing)
    logits = widened(output)
    weights = class_weights(weight, logits, classes)
    count: Tensor | int
    if targets.is_floating_point():
        wanted, count = _second(targets.to(logits.dtype), place), targets.numel() // max(1, classes)
    else:
        wanted, count = (targets.flatten() if last else targets), _count(targets, weights, ignore_index)
    total = F.cross_entropy(
        _second(logits, place), wanted, weights, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction="sum",
    )  # fmt: skip
    return Loss(total, count)


def _lazy_cross_entropy(
    output: Logits, targets: Tensor, weight: Tensor | Sequence[float] | None, ignore_index: int, smoothing: float
) -> Loss:
    """Computed in chunks, of a vocabulary that ranks may share."""
    if weight is None:
        return Loss(output.cross_entropy(targets, ignore_index, smoothing), _count(targets, None, ignore_index))
    like = torch.empty(0, dtype=torch.promote_types(output.dtype, torch.float32), device=output.device)
    weights = class_weights(weight, like, output.shape[-1])
    assert weights is not None
    total = output.weighted_cross_entropy(targets, weights, ignore_index)
    return Loss(total, _count(targets, weights, ignore_index))


def _count(targets: Tensor, weights: Tensor | None, ignore_index: int) -> Tensor:
    """How many targets count, or what they weigh together."""
    counted = targets != ignore_index
    if weights is None:
        return counted.sum()
    return weights[targets.where(counted, 0)].where(counted, 0).sum()


def _second(tensor: Tensor, dim: int) -> Tensor:
    """A tensor with its classes in dim 1, where torch has them."""
    return tensor.reshape(-1, tensor.shape[-1]) if dim == tensor.ndim - 1 else tensor.movedim(dim, 1)


def focal(
    output: Tensor | Logits,
    targets: Tensor,
    *,
    gamma: float = 2.0,
    weight: Tensor | Sequence[float] | None = None,
    ignore_index: int = -100,
    dim: int | None = None,
) -> Loss:
    """Focal loss of scores and classes: `cross_entropy` whose terms count ``(1 - p) ** gamma`` times.

    ``p`` is the probability of the right class. Shapes, ``weight`` and ``ignore_index`` are those of `cross_entropy`,
    and so is the count. For a yes or a no at each place: `binary_focal`.
    """
    place = class_dim(output, targets, dim)
    if targets.is_floating_point():
        raise WrongUse(
            f"the targets are {targets.dtype} of the output's shape, {tuple(targets.shape)}: a focal loss of "
            "probabilities is not known. For a yes or a no at each place, write phalanx.losses.binary_focal(output, "
            "targets); for one class at each place, give its number."
        )
    logits, targets = widened(output), targets.long()
    weights = class_weights(weight, logits, logits.shape[place])
    wanted = targets.flatten() if place == logits.ndim - 1 else targets
    terms = F.cross_entropy(_second(logits, place), wanted, ignore_index=ignore_index, reduction="none")
    terms = _power(-torch.expm1(-terms), gamma) * terms
    if weights is not None:
        terms = terms * weights[wanted.where(wanted != ignore_index, 0)]
    return Loss(terms.sum(), _count(targets, weights, ignore_index))


def binary_focal(
    output: Tensor,
    targets: Tensor,
    *,
    gamma: float = 2.0,
    alpha: float | None = 0.25,
    ignore_index: int | None = None,
) -> Loss:
    """Focal loss of yes-or-no scores, summed, and how many there are.

    ``alpha`` weighs what is there and ``1 - alpha`` what is not; None: both alike. Detectors divide by the number of
    objects: ``phalanx.Loss(found.total, objects)``.
    """
    check_same_shape(output, targets)
    scores = widened(output)
    wanted = targets.to(scores.dtype)
    far = scores.sigmoid() * (1 - wanted) + (-scores).sigmoid() * wanted
    terms = _power(far, gamma) * F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    if alpha is not None:
        terms = terms * (alpha * wanted + (1 - alpha) * (1 - wanted))
    return _summed(terms, targets, ignore_index)


def _power(far: Tensor, gamma: float) -> Tensor:
    """Of how far probabilities are from 1; the gradient is finite also where they are 1."""
    return far.clamp_min(torch.finfo(far.dtype).tiny) ** gamma


def log_probs(output: Tensor | Logits, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The log-probability of each sequence: summed over its targets, ``[batch, time]``, but those to be ignored.

    Of the output, ``[batch, time, classes]``, classes are the last dim. Not a loss yet: what preferences between
    sequences are made of.
    """
    if output.shape[:-1] != targets.shape:
        raise mismatch(output.shape, targets.shape)
    if isinstance(output, Logits) and output.lazy:
        return output.log_probs(targets, ignore_index)
    logits = widened(output).flatten(0, -2)
    rows = F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="none")
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
    logs, wanted = (widened(each).log_softmax(-1) for each in (warm, other))
    one, two = (logs, wanted.detach()) if reverse else (wanted.detach(), logs)
    rows = (one.exp() * (one - two)).sum(-1)
    return Loss(rows.where(counted, 0).sum(), counted.sum())


def kl_div(output: Tensor, targets: Tensor, *, log_target: bool = False) -> Loss:
    """KL(targets || output) of log-probabilities and probabilities, as `torch.nn.functional.kl_div` sums it.

    The count is that of samples: total over count is ``reduction="batchmean"``. ``log_target``: targets are
    log-probabilities too. Of two models' scores: `divergence`.
    """
    check_same_shape(output, targets)
    logs = widened(output)
    return Loss(F.kl_div(logs, targets.to(logs.dtype), reduction="sum", log_target=log_target), len(output))


def mean_squared_error(output: Tensor, targets: Tensor) -> Loss:
    """Squared differences, summed, and how many there are."""
    return _of_differences(F.mse_loss, output, targets)


def l1(output: Tensor, targets: Tensor) -> Loss:
    """Absolute differences, summed, and how many there are."""
    return _of_differences(F.l1_loss, output, targets)


def huber(output: Tensor, targets: Tensor, *, delta: float = 1.0) -> Loss:
    """Huber loss, as `torch.nn.functional.huber_loss`: squares up to ``delta``, straight lines beyond."""
    return _of_differences(F.huber_loss, output, targets, delta=delta)


def smooth_l1(output: Tensor, targets: Tensor, *, beta: float = 1.0) -> Loss:
    """Smooth L1, as `torch.nn.functional.smooth_l1_loss`: the Huber loss divided by ``beta``."""
    return _of_differences(F.smooth_l1_loss, output, targets, beta=beta)


def _of_differences(function: Callable[..., Tensor], output: Tensor, targets: Tensor, **options: float) -> Loss:
    check_same_shape(output, targets)
    wide = widened(output)
    return Loss(function(wide, targets.to(wide.dtype), reduction="sum", **options), targets.numel())


def binary_cross_entropy(
    output: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | float | None = None,
    ignore_index: int | None = None,
) -> Loss:
    """Cross-entropy of yes-or-no scores, as `torch.nn.functional.binary_cross_entropy_with_logits`.

    ``weight`` multiplies each term and ``pos_weight`` those of a yes; both are broadcast to the targets, and do not
    change the count, as in torch. Targets that are ``ignore_index`` do not count.
    """
    check_same_shape(output, targets)
    scores = widened(output)
    each, of_yes = (None if given is None else torch.as_tensor(given).to(scores) for given in (weight, pos_weight))
    reduction = "sum" if ignore_index is None else "none"
    terms = F.binary_cross_entropy_with_logits(
        scores, targets.to(scores.dtype), each, pos_weight=of_yes, reduction=reduction
    )
    return Loss(terms, targets.numel()) if ignore_index is None else _summed(terms, targets, ignore_index)


def _summed(terms: Tensor, targets: Tensor, ignore_index: int | None) -> Loss:
    """Terms of each target, but for those to be ignored, and how many are left."""
    if ignore_index is None:
        return Loss(terms.sum(), targets.numel())
    counted = targets != ignore_index
    return Loss(terms.where(counted, 0).sum(), counted.sum())
