"""Which dim of an output has the classes: the second, as in torch, the last of `Logits`, or the one that is asked for.

The sizes of a batch never decide: some batches are padded to a length that is the number of classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.logits import Logits


def class_dim(output: Tensor | Logits, targets: Tensor, dim: int | None) -> int:
    """The dim of ``output`` that has the classes; targets that do not fit it are refused.

    Targets are whole numbers, the class at each place, or real ones, the probability of each class.
    """
    ndim = output.ndim
    if not ndim or not -ndim <= (dim or 0) < ndim:
        raise WrongUse(f"the output has shape {tuple(output.shape)}: it has no dim {dim or 0}, where classes would be.")
    default = ndim - 1 if isinstance(output, Logits) else min(1, ndim - 1)
    found = default if dim is None else dim % ndim
    if targets.shape != _wanted(output, targets, found):
        raise _unfit(output, targets, found)
    doubtful = dim is None and not isinstance(output, Logits) and ndim > 2 and not targets.is_floating_point()
    if doubtful and targets.shape == _wanted(output, targets, ndim - 1):
        warnings.warn(
            "the targets fit an output with its classes in dim 1 and one with its classes in the last dim. They are "
            "taken from dim 1, as torch does. Write dim=1 if that is meant, dim=-1 for a language model.",
            stacklevel=3,
        )
    return found


def class_weights(weight: Tensor | Sequence[float] | None, output: Tensor, classes: int) -> Tensor | None:
    """A weight for each class, on the device and in the dtype of ``output``."""
    if weight is None:
        return None
    found = torch.as_tensor(weight, dtype=output.dtype, device=output.device)
    if found.shape != (classes,):
        raise WrongUse(
            f"weight has shape {tuple(found.shape)}, and the output has {classes} classes. Give one weight for each "
            "class; weights of samples belong into a Loss of your own: phalanx.Loss((w * terms).sum(), w.sum())."
        )
    return found


def widened(output: Tensor | Logits) -> Tensor:
    """The output as a tensor, in float32 or wider."""
    found = output.tensor() if isinstance(output, Logits) else output
    return found.to(torch.promote_types(found.dtype, torch.float32))


def check_same_shape(output: Tensor, targets: Tensor) -> None:
    """Refuse targets that would be broadcast."""
    if output.shape != targets.shape:
        raise mismatch(output.shape, targets.shape)


def mismatch(output: Sequence[int], targets: Sequence[int], advice: str = "") -> WrongUse:
    """An output and targets that do not belong together."""
    return WrongUse(
        f"the model's output has shape {tuple(output)} and the targets {tuple(targets)}: they do not belong together. "
        f"{advice or 'Check what Task.loss passes to the loss.'}"
    )


def _wanted(output: Tensor | Logits, targets: Tensor, dim: int) -> torch.Size:
    """The shape that targets must have if this dim of the output has the classes."""
    shape = output.shape
    return shape if targets.is_floating_point() else shape[:dim] + shape[dim + 1 :]


def _unfit(output: Tensor | Logits, targets: Tensor, dim: int) -> WrongUse:
    shape, ndim = output.shape, output.ndim
    if targets.is_floating_point():
        if targets.shape == shape[:dim] + shape[dim + 1 :]:
            return WrongUse(
                f"the targets are {targets.dtype} of shape {tuple(targets.shape)}, one for each row of the output: as "
                "classes they must be whole numbers. Write targets.long()."
            )
        return mismatch(shape, targets.shape)
    if targets.shape == shape:
        if ndim == 1 or shape[dim] == 1:
            return WrongUse(
                f"the targets have the shape of the output, {tuple(shape)}, with one score for each: that is a yes or "
                "a no. Write phalanx.losses.binary_cross_entropy(output, targets.float())."
            )
        return WrongUse(
            f"the targets have the shape of the output, {tuple(shape)}, and are whole numbers: as the probability of "
            "each class they must be real. Write targets.float(), or give the class alone: "
            f"targets.argmax({dim if dim != ndim - 1 else -1})."
        )
    others = [other for other in reversed(range(ndim)) if targets.shape == _wanted(output, targets, other)]
    if not others:
        return mismatch(shape, targets.shape)
    other = -1 if others[0] == ndim - 1 else others[0]
    whose = ", where a language model has them" if other == -1 else ""
    return mismatch(
        shape, targets.shape,
        f"Classes are in dim {dim}{', as in torch' if dim == 1 else ''}, so that targets of shape "
        f"{tuple(_wanted(output, targets, dim))} are expected. If they are in dim {other}{whose}, write dim={other}: "
        f"phalanx.losses.cross_entropy(output, targets, dim={other}).",
    )  # fmt: skip
