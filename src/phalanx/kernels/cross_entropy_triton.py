"""Softmax over rows of logits, written for GPUs: the plain twin is in `kernels.cross_entropy`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def statistics(logits: Tensor, index: Tensor, found: Tensor, inner: float, outer: float, kind: int) -> None:
    """``found``: ``[4, rows]``: the largest of each row, the sum of exponentials, the target's, the sum."""
    classes = logits.shape[1]
    _statistics[(len(logits),)](
        logits, logits.stride(0), index, *found, classes, inner, outer, KIND=kind, WHOLE=classes // BLOCK * BLOCK,
        REST=classes % BLOCK > 0, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def gradient(
    logits: Tensor, found: Tensor, index: Tensor, normaliser: Tensor, valid: Tensor, factor: float,
    share: float, rest: float, inner: float, outer: float, kind: int,
) -> None:  # fmt: skip
    """``found`` may be the logits."""
    _gradient[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits, logits.stride(0), found, found.stride(0), index, normaliser, valid, logits.shape[1], factor,
        share, rest, inner, outer, KIND=kind, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def scale(given: Tensor, factor: Tensor, found: Tensor) -> None:
    """``given`` times one number, rounded once."""
    if given.numel():
        _scale[(triton.cdiv(given.numel(), BLOCK),)](given, factor, found, given.numel(), BLOCK=BLOCK, num_warps=8)


@triton.jit
def _scale(given, factor, found, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    x = tl.load(given + at, mask=here).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(found + at, x.to(found.dtype.element_ty), mask=here)


@triton.jit
def _bent(x, inner, outer, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == 1:
        x = inner * x
    if KIND == 2:
        x = outer * (2 * tl.sigmoid(2 * inner * x) - 1)
    return x


@triton.jit
def _further(top, spread, total, x, here, KIND: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every lane for itself."""
    higher = tl.maximum(top, x)
    added = tl.exp(x - higher)
    if MASKED:
        higher = tl.where(here, higher, top)
        added = tl.where(here, tl.exp(x - higher), 0.0)
        x = tl.where(here, x, 0.0)
    return higher, spread * tl.exp(top - higher) + added, total + x


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, stride, index, tops, spreads, chosens, totals, classes, inner, outer,
    KIND: tl.constexpr, WHOLE: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program. Lanes come together at the end; whole blocks are read without a mask, in wide words.

    ``WHOLE``: classes in whole blocks, ``REST``: whether there are more. Not every interpreter loops to a tensor's end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    spread, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WHOLE, BLOCK):
        x = _bent(tl.load(logits + start + lanes).to(tl.float32), inner, outer, KIND)
        top, spread, total = _further(top, spread, total, x, lanes, KIND, False)
    if REST:
        here = WHOLE + lanes < classes
        x = tl.load(logits + WHOLE + lanes, mask=here, other=0.0).to(tl.float32)
        top, spread, total = _further(top, spread, total, _bent(x, inner, outer, KIND), here, KIND, True)
    highest = tl.max(top, 0)
    tl.store(tops + row, highest)
    tl.store(spreads + row, tl.sum(spread * tl.exp(top - highest), 0))
    tl.store(totals + row, tl.sum(total, 0))
    target = tl.load(index + row)
    chosen = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(chosens + row, tl.where(target >= 0, _bent(chosen, inner, outer, KIND), 0.0))


@triton.jit
def _by_logits(  # type: ignore[no-untyped-def]
    x, offsets, target, normaliser, valid, share, rest, inner, outer, KIND: tl.constexpr
):
    x = _bent(x.to(tl.float32), inner, outer, KIND)
    found = tl.exp(x - normaliser) - share
    found = tl.where(offsets == target, found - rest, found)
    if KIND == 1:
        found *= inner
    if KIND == 2:
        found *= inner * (outer - x * x / outer)
    return tl.where(valid, found, 0.0)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, stride, gradients, spacing, index, normalisers, valid, classes, factor, share, rest, inner, outer,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    places, there = logits + row * stride + offsets, gradients + row * spacing + offsets
    target, normaliser, counts = tl.load(index + row), tl.load(normalisers + row), tl.load(valid + row)
    if start + BLOCK <= classes:
        x = tl.load(places)
        found = _by_logits(x, offsets, target, normaliser, counts, share, rest, inner, outer, KIND)
        tl.store(there, (found * factor).to(gradients.dtype.element_ty))
    else:
        here = offsets < classes
        x = tl.load(places, mask=here, other=0.0)
        found = _by_logits(x, offsets, target, normaliser, counts, share, rest, inner, outer, KIND)
        tl.store(there, (found * factor).to(gradients.dtype.element_ty), mask=here)
