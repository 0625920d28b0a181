"""Transposing a matrix of 8 bits, and its largest number, in one pass: the plain twin is in `kernels.fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
BITS = {torch.float8_e4m3fn: (3, 7, 126), torch.float8_e5m2: (2, 15, 123)}
"""Behind the point, what is taken from an exponent, and the largest that is a number."""


def transposed(narrow: Tensor) -> tuple[Tensor, Tensor]:
    """``narrow.T``, row by row in memory, and the largest number in size."""
    found = narrow.new_empty(narrow.shape[1], narrow.shape[0])
    return found, transpose(narrow, found)


def transpose(narrow: Tensor, found: Tensor) -> Tensor:
    """Into ``found``, whose rows may lie apart; gives the largest number."""
    rows, columns = narrow.shape
    top = torch.zeros((), device=narrow.device)
    behind, bias, last = BITS[narrow.dtype]
    if rows * columns:
        _transpose[(triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK))](
            narrow.contiguous().view(torch.uint8), found.view(torch.uint8), found.stride(0), top, rows, columns,
            BEHIND=behind, BIAS=bias, LAST=last, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return top


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]
    given, found, stride, top, rows, columns,
    BEHIND: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile a program. Sizes of numbers are in the order of their bits without the sign."""
    row, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(given + row.to(tl.int64)[:, None] * columns + column[None, :], mask=here, other=0)
    there = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(found + column.to(tl.int64)[:, None] * stride + row[None, :], tl.trans(x), mask=there)
    bits = tl.max(tl.max((x & 127).to(tl.int32), 1), 0)
    exponent = (bits >> BEHIND).to(tl.float32)
    rest = (bits & ((1 << BEHIND) - 1)).to(tl.float32) / (1 << BEHIND)
    normal, tiny = tl.exp2(exponent - BIAS) * (1 + rest), tl.exp2(1.0 - BIAS) * rest
    found_top = tl.where(exponent > 0, normal, tiny)
    tl.atomic_max(top, tl.where(bits > LAST, float("inf"), found_top))
