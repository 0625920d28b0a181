"""Sums of squares of many tensors in one launch, which reads each once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, SPAN = 4096, 8 * 4096
"""What a program reads at a time, and in all."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def squares(places: Tensor, spans: Tensor, found: Tensor, dtype: torch.dtype, even: bool) -> None:
    """``places``: ``[tensors, 2]``, address and size; ``spans``: ``[programs, 2]``, which of them, where.

    ``found``: of each program. ``even``: all begins and ends at even places.
    """
    _squares[(len(spans),)](places, spans, found, TYPE=TYPES[dtype], EVEN=even, BLOCK=BLOCK, SPAN=SPAN, num_warps=8)


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    places, spans, found, TYPE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr
):
    """A span of a tensor a program."""
    program = tl.program_id(0).to(tl.int64)
    row = places + 2 * tl.load(spans + 2 * program).to(tl.int64)
    begin = tl.load(spans + 2 * program + 1).to(tl.int64) * SPAN
    numbers, size = tl.load(row).to(tl.pointer_type(TYPE)), tl.load(row + 1)
    if EVEN:
        numbers, size = tl.multiple_of(numbers, 16), tl.multiple_of(size, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SPAN, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        x = tl.load(numbers + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(found + program, tl.sum(total, 0))
