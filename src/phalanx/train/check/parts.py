"""What of a whole batch belongs to some of its samples, beside what these give when they are alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.logits import Logits
from phalanx.trees import branches


def paired(whole: Any, alone: Any, part: range, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensor by tensor, what belongs to a part of ``count`` samples in what all of them gave, and what it gave alone.

    A list with one item a sample, as of boxes or of pictures of unequal size, is compared sample by sample. What cannot
    be told apart by samples is left out.
    """
    whole, alone = (each.hidden if isinstance(each, Logits) else each for each in (whole, alone))
    if isinstance(whole, Tensor) and isinstance(alone, Tensor):
        rows = rows_of(whole, part, count, alone)
        if rows is not None:
            yield rows, alone
        return
    items, own = branches(whole), branches(alone)
    if items is None or own is None:
        return
    if isinstance(alone, (list, tuple)) and len(items) == count and len(own) == len(part):
        for one, other in zip(items[part.start : part.stop], own, strict=True):
            yield from paired(one, other, range(1), 1)
        return
    for one, other in zip(items, own, strict=False):
        yield from paired(one, other, part, count)


def rows_of(whole: Tensor, part: range, count: int, alone: Tensor) -> Tensor | None:
    """What of a batch's tensor belongs to some of its samples, shaped as theirs; None where that cannot be told."""
    if whole.ndim != alone.ndim:
        return None
    for dim in range(min(2, whole.ndim)):
        rest = [(a, b) for d, (a, b) in enumerate(zip(whole.shape, alone.shape, strict=True)) if d != dim]
        each, left = divmod(alone.shape[dim], len(part))
        if not left and each and whole.shape[dim] == each * count and all(a == b for a, b in rest):
            return whole.narrow(dim, part.start * each, alone.shape[dim])
    return whole if whole.shape == alone.shape else None


def differ(whole: Tensor, alone: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors are not the same, but for rounding. ``dtype``: what was computed in."""
    if not whole.is_floating_point():
        return not torch.equal(whole, alone)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    scale = max((float(t.nan_to_num(0, 0, 0).abs().max()) for t in (whole, alone) if t.numel()), default=0.0)
    return not torch.allclose(whole.nan_to_num(), alone.nan_to_num(), rtol=tolerance, atol=tolerance * scale)


def longer(whole: Any, alone: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of the first column that is longer in a batch than in a part of it, but for its samples: padded."""
    if isinstance(whole, Tensor) and isinstance(alone, Tensor):
        sizes, own = tuple(whole.shape), tuple(alone.shape)
        more = len(sizes) == len(own) and any(a > b for a, b in zip(sizes[1:], own[1:], strict=True))
        return (sizes, own) if more else None
    pairs = zip(branches(whole) or (), branches(alone) or (), strict=False)
    return next((found for a, b in pairs if (found := longer(a, b)) is not None), None)
