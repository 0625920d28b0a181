"""Codes of 4 bits made numbers in one pass over memory: the plain twin is in `kernels.nf4`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024
"""That a program reads."""


def widen(packed: Tensor, scale: Tensor, table: Tensor, found: Tensor) -> None:
    """See the twin; ``table``: of the 16 values."""
    if len(packed):
        _widen[(triton.cdiv(len(packed), BYTES),)](
            packed, scale, table, found, len(packed), HALF=len(packed) // len(scale), BYTES=BYTES, num_warps=4
        )


@triton.jit
def _widen(packed, scale, table, found, count, HALF: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BYTES
    at = start + tl.arange(0, BYTES)
    here = at < count
    codes = tl.load(packed + at, mask=here, other=0).to(tl.int32)
    factor = tl.load(scale + at // HALF, mask=here, other=0.0)
    values = tl.interleave(tl.load(table + (codes >> 4)) * factor, tl.load(table + (codes & 15)) * factor)
    to = 2 * start + tl.arange(0, 2 * BYTES)
    tl.store(found + to, values.to(found.dtype.element_ty), mask=to < 2 * count)
