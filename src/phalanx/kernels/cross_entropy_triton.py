"""Softmax over rows of logits, written for GPUs: the plain twin is in `kernels.cross_entropy`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LANES = 2048
"""Of a row's statistics. Each takes four logits at a time."""


def statistics(logits: Tensor, index: Tensor, found: Tensor, inner: float, outer: float, kind: int) -> None:
    """``found``: ``[4, rows]``: the largest of each row, the sum of exponentials, the target's, the sum."""
    classes, step = logits.shape[1], 4 * LANES
    whole = classes // step * step
    _statistics[(len(logits),)](
        logits, logits.stride(0), index, *found, classes, inner, outer, KIND=kind, WHOLE=whole,
        END=whole + triton.cdiv(classes - whole, LANES) * LANES, LANES=LANES, num_warps=8,
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
def _read(logits, inner, outer, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    return _bent(tl.load(logits).to(tl.float32), inner, outer, KIND)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, stride, index, tops, spreads, chosens, totals, classes, inner, outer,
    KIND: tl.constexpr, WHOLE: tl.constexpr, END: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A row a program. Lanes come together at the end, and each scales its sum once for four logits: exponentials are
    what this waits for. Whole blocks are read without a mask, in wide words.

    ``WHOLE``: classes in blocks of four; to ``END``, in single ones. Not every interpreter loops to a tensor's end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, LANES)
    top = tl.full((LANES,), -3.0e38, tl.float32)
    spread, total = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    for start in range(0, WHOLE, 4 * LANES):
        at = logits + start + lanes
        a, b = _read(at, inner, outer, KIND), _read(at + LANES, inner, outer, KIND)
        c, d = _read(at + 2 * LANES, inner, outer, KIND), _read(at + 3 * LANES, inner, outer, KIND)
        higher = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        added = tl.exp(a - higher) + tl.exp(b - higher) + (tl.exp(c - higher) + tl.exp(d - higher))
        top, spread = higher, spread * tl.exp(top - higher) + added
        total += (a + b) + (c + d)
    for start in range(WHOLE, END, LANES):
        here = start + lanes < classes
        x = _bent(tl.load(logits + start + lanes, mask=here, other=0.0).to(tl.float32), inner, outer, KIND)
        higher = tl.where(here, tl.maximum(top, x), top)
        spread = spread * tl.exp(top - higher) + tl.where(here, tl.exp(x - higher), 0.0)
        top, total = higher, total + tl.where(here, x, 0.0)
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
