"""Soft Dice losses: how far predicted masks overlap with true ones, of each sample or of the whole global batch.

Of the global batch, ranks need sums of each sample and class alone, two numbers: pixels stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from phalanx.class_dims import check_same_shape, class_dim, class_weights, mismatch, widened
from phalanx.errors import WrongUse
from phalanx.gathering import gather
from phalanx.logits import Logits
from phalanx.loss import Loss

Over = Literal["sample", "batch"]


def dice(
    output: Tensor | Logits,
    targets: Tensor,
    *,
    over: Over = "sample",
    smooth: float = 1.0,
    weight: Tensor | Sequence[float] | None = None,
    ignore_index: int = -100,
    dim: int | None = None,
) -> Loss:
    """Soft Dice loss of scores and classes: 1 minus the mean Dice of all classes, of their softmax.

    ``output`` is ``[batch, classes, ...]`` and ``targets``, whole numbers, ``[batch, ...]``, as in `cross_entropy`;
    ``dim`` asks for another dim of classes. A class's Dice is ``(2 * overlap + smooth) / (both + smooth)``.

    ``over="sample"``: of each sample by itself. ``over="batch"``: of all samples of the global batch together, the
    same number at any layout and micro-batch; it is summed over ranks, and costs a second forward where a rank
    computes several micro-batches. ``weight``: of each class, 0 to leave the background out. Targets that are
    ``ignore_index`` do not count. For a mask, a yes or a no at each place: `binary_dice`.
    """
    if output.shape == targets.shape and dim is None:
        raise WrongUse(
            f"the targets have the shape of the output, {tuple(targets.shape)}. For masks, each place a yes or a no, "
            "write phalanx.losses.binary_dice(output, targets). For classes, give their numbers: targets.argmax(1); "
            "or write dim=1 if the targets are the probability of each class."
        )
    place = class_dim(output, targets, dim)
    classes = output.shape[place]
    if output.ndim < 2 or not place:
        raise mismatch(output.shape, targets.shape, "Dice needs samples in the first dim and classes in another.")
    if classes < 2:
        raise WrongUse(
            f"the output has shape {tuple(output.shape)}, one class: its softmax is 1 everywhere. For a mask, write "
            "phalanx.losses.binary_dice(output, targets), with targets of the output's shape."
        )
    found = widened(output).movedim(place, 1).softmax(1)
    if targets.is_floating_point():
        wanted, counted = targets.to(found.dtype).movedim(place, 1), None
    else:
        counted = (targets != ignore_index).unsqueeze(1)
        index = targets.long().unsqueeze(1).where(counted, 0)
        _check_classes(index, classes)
        wanted = torch.zeros_like(found).scatter_(1, index, counted.to(found.dtype))
    return _loss(found, wanted, counted, over, smooth, class_weights(weight, found, classes))


def binary_dice(
    output: Tensor,
    targets: Tensor,
    *,
    over: Over = "sample",
    smooth: float = 1.0,
    ignore_index: int | None = None,
    dim: int | None = None,
) -> Loss:
    """Soft Dice loss of yes-or-no scores and masks of the same shape: 1 minus the Dice of their sigmoid.

    The first dim is that of samples. ``dim``: channels that each have a Dice of their own, of which the mean is taken;
    without it, all places of a sample are one mask. The rest is as in `dice`.
    """
    check_same_shape(output, targets)
    found = widened(output).sigmoid()
    wanted, counted = targets.to(found.dtype), None if ignore_index is None else targets != ignore_index
    if dim is not None and not 0 < (dim + found.ndim if dim < 0 else dim) < found.ndim:
        raise WrongUse(f"dim={dim} is no dim of channels of an output of shape {tuple(found.shape)}.")

    def masks(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(1) if dim is None else tensor.movedim(dim, 1)

    return _loss(masks(found), masks(wanted), None if counted is None else masks(counted), over, smooth, None)


def _loss(
    found: Tensor, wanted: Tensor, counted: Tensor | None, over: Over, smooth: float, weights: Tensor | None
) -> Loss:
    """Of probabilities and what they should be, both ``[batch, classes, ...]``."""
    if over not in ("sample", "batch"):
        raise WrongUse(f"over={over!r} is not known. Write over='sample' or over='batch'.")
    if counted is not None:
        found, wanted = found.where(counted, 0), wanted.where(counted, 0)
    sums = torch.stack([_by_class(found * wanted), _by_class(found) + _by_class(wanted)], 1)
    if over == "batch":
        whole = gather(sums).sum(0, keepdim=True)
        return Loss(_one_minus_dice(whole, smooth, weights).sum() * len(sums), len(sums))
    losses = _one_minus_dice(sums, smooth, weights)
    if counted is None:
        return Loss(losses.sum(), len(losses))
    some = counted.flatten(1).any(1)
    return Loss(losses.where(some, 0).sum(), some.sum())


def _by_class(tensor: Tensor) -> Tensor:
    """Sums over the places of each sample and class."""
    return tensor.unsqueeze(-1).flatten(2).sum(2)


def _one_minus_dice(sums: Tensor, smooth: float, weights: Tensor | None) -> Tensor:
    """Of each row; a class that is nowhere and not predicted either is right."""
    overlap, both = sums.unbind(1)
    there = both + smooth > 0
    dice = ((2 * overlap + smooth) / (both + smooth).where(there, 1)).where(there, 1)
    if weights is None:
        return 1 - dice.mean(1)
    if not weights.is_cuda and not float(weights.sum()) > 0:
        raise WrongUse("the weights of all classes are 0, which leaves nothing to learn. Give one of them a weight.")
    return 1 - (dice * weights).sum(1) / weights.sum()


def _check_classes(targets: Tensor, classes: int) -> None:
    """Refuse classes that there are none of; on a GPU, torch does so itself."""
    if not targets.is_cuda and targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise IndexError(
            f"targets of {int(targets.min())} to {int(targets.max())} are out of range of {classes} classes"
        )
