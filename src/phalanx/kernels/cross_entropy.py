"""Softmax over rows of logits in two passes: what their loss needs to know, and its gradient in their place.

Between the passes the ranks that share a vocabulary come to terms. On a GPU each pass reads logits once, as narrow as
they are, and computes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.choice import Kernel


@dataclass(frozen=True)
class Bending:
    """What becomes of logits before the softmax: ``outer * tanh(inner * x)``, or ``inner * x`` where outer is 0."""

    inner: float = 1.0
    outer: float = 0.0

    @property
    def none(self) -> bool:
        return self.inner == 1 and not self.outer

    @property
    def kind(self) -> int:
        """What a kernel is compiled for."""
        return 0 if self.none else 2 if self.outer else 1

    def __call__(self, x: Tensor) -> Tensor:
        if self.outer:
            return self.outer * torch.tanh(self.inner * x)
        return x if self.none else self.inner * x

    def slope(self, bent: Tensor) -> Tensor | float:
        """By how much bent logits change with what they were."""
        return self.inner * (self.outer - bent.square() / self.outer) if self.outer else self.inner


AS_THEY_ARE = Bending()


@dataclass
class Statistics:
    """Of each row, in float32 or wider."""

    top: Tensor
    """The largest logit."""
    spread: Tensor
    """The sum of ``exp(logit - top)``."""
    chosen: Tensor
    """The target's logit; 0 where the target is not here."""
    total: Tensor
    """The sum of logits."""


def statistics(logits: Tensor, index: Tensor, bending: Bending) -> Statistics:
    """``index``: of each row, the target, or -1 where it is not here."""
    if not logits.shape[1]:
        none = logits.new_zeros(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
        return Statistics(torch.full_like(none, torch.finfo(none.dtype).min), none, none, none)
    return (_statistics_by_kernel if KERNEL.used(logits) else _statistics_plainly)(logits, index, bending)


def gradient_(
    logits: Tensor, index: Tensor, normaliser: Tensor, valid: Tensor, share: float, smoothing: float, bending: Bending,
    found: Tensor | None = None, factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Of the summed loss by the logits, in their place or, times a factor, in that of ``found``.

    ``share``: what smoothing gives each class.
    """
    found = logits if found is None else found
    if not logits.shape[1]:
        return found
    by = _gradient_by_kernel if KERNEL.used(logits) else _gradient_plainly
    return by(logits, index, normaliser, valid, share, smoothing, bending, found, factor)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """As many numbers in another dtype, each times the one of ``factor``."""
    found = torch.empty_like(gradient, dtype=dtype)
    if gradient.is_contiguous() and gradient.dtype != dtype and KERNEL.used(gradient) and KERNEL.used(found):
        return _scaled_by_kernel(gradient, factor, found)
    # of no dims, it would be rounded to what it scales
    return torch.mul(gradient, factor.view([1] * gradient.ndim), out=found)


def _statistics_plainly(logits: Tensor, index: Tensor, bending: Bending) -> Statistics:
    bent = bending(logits)
    top = bent.amax(1)
    chosen = bent.gather(1, index.clamp(min=0).unsqueeze(1)).squeeze(1).where(index >= 0, 0)
    return Statistics(top, (bent - top.unsqueeze(1)).exp().sum(1), chosen, bent.sum(1))


def _gradient_plainly(
    logits: Tensor, index: Tensor, normaliser: Tensor, valid: Tensor, share: float, smoothing: float, bending: Bending,
    found: Tensor, factor: float,
) -> Tensor:  # fmt: skip
    slope = None if bending.none else bending.slope(bent := bending(logits))
    if slope is not None:
        logits.copy_(bent)
    logits.sub_(normaliser.unsqueeze(1)).exp_()
    if share:
        logits.sub_(share)
    here = (index >= 0).unsqueeze(1)
    taken = torch.full_like(index, smoothing - 1, dtype=logits.dtype).unsqueeze(1).where(here, 0)
    logits.scatter_add_(1, index.clamp(min=0).unsqueeze(1), taken)
    if slope is not None:
        logits.mul_(slope)
    logits.mul_(valid.unsqueeze(1))
    return logits if found is logits else found.copy_(logits.mul_(factor))


def _statistics_by_kernel(logits: Tensor, index: Tensor, bending: Bending) -> Statistics:
    from phalanx.kernels.cross_entropy_triton import statistics  # triton takes longer to import than all of us

    found = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    statistics(logits, index, found, bending.inner, bending.outer, bending.kind)
    return Statistics(*found)


def _gradient_by_kernel(
    logits: Tensor, index: Tensor, normaliser: Tensor, valid: Tensor, share: float, smoothing: float, bending: Bending,
    found: Tensor, factor: float,
) -> Tensor:  # fmt: skip
    from phalanx.kernels.cross_entropy_triton import gradient

    rest = 1 - smoothing
    gradient(logits, found, index, normaliser, valid, factor, share, rest, bending.inner, bending.outer, bending.kind)
    return found


def _scaled_by_kernel(gradient: Tensor, factor: Tensor, found: Tensor) -> Tensor:
    from phalanx.kernels.cross_entropy_triton import scale

    scale(gradient, factor, found)
    return found


def _trial(device: torch.device) -> bool:
    plain = torch.linspace(-9, 9, 3 * 70, device=device).view(3, 70)
    index, valid = torch.tensor([5, -1, 69], device=device), torch.tensor([True, True, False], device=device)
    found, own = _statistics_by_kernel(plain, index, AS_THEY_ARE), plain.bfloat16()
    normaliser = found.top + found.spread.log()
    _gradient_by_kernel(own, index, normaliser, valid, 0.0, 0.0, AS_THEY_ARE, own, 1.0)
    want = _statistics_plainly(plain, index, AS_THEY_ARE)
    _gradient_plainly(expected := plain.clone(), index, normaliser, valid, 0.0, 0.0, AS_THEY_ARE, expected, 1.0)
    if own.is_cuda:  # a product of narrow factors, added to a wide sum inside of it
        torch.addmm(torch.mm(own.T, own, out_dtype=torch.float32), own.T, own, out_dtype=torch.float32)
    halves = torch.empty_like(own)
    _scaled_by_kernel(plain, torch.full((), 0.5, device=device), halves)
    if not torch.allclose(halves.float(), plain / 2, rtol=0.01):
        return False
    return torch.allclose(found.spread, want.spread, rtol=1e-4) and torch.allclose(own.float(), expected, atol=0.05)


KERNEL = Kernel.declared("the cross-entropy", _trial)
