"""Numbers in 8, 4 bits or 1, block by block: codes, and one scale for all codes of a block.

    block   codes, one or half a byte each, and then the scale, as wide as the numbers

A code is a number divided by the scale and rounded to the nearest, halves to even; the scale is the block's largest
number by ``full``, which rounds to the largest code. Of two codes that share a byte, the lower half of it is of the
first half of the block. A block with a number that is not finite becomes one of which none is.

One bit says whether a number is negative, and the scale is the mean of what numbers are without their signs: of the
first ``counts`` of a block, the rest of it being zeros, which stay so. Of eight that share a byte, the lowest is of the
first eighth of the block. The sum is one of halves: the first half of the block is added to the second, the first half
of that to its second, and so on to one number.

Here everything is made of torch's operations. What is faster gives the same bits: on a processor `blockwise_cpu`, on a
GPU `blockwise_triton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = {8: 256, 4: 128, 1: 1024}
"""By bits: numbers in a block."""
FULL = {8: 127.0, 4: 7.0, 1: 1.0}
"""By bits: the largest code."""
EIGHTHS = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)


def block_bytes(bits: int, dtype: torch.dtype) -> int:
    """Of one block of numbers of this dtype."""
    return BLOCKS[bits] * bits // 8 + dtype.itemsize


def encode(
    x: Tensor, bits: int, full: float, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    """Put the blocks of flat numbers, as many as fill blocks, into ``out``, flat bytes.

    ``owed`` is added to the numbers first. ``left`` takes what codes do not say of them; it may be ``owed``. With one
    bit, ``counts`` are the numbers of each block that count, as int32; None: all do.
    """
    size = BLOCKS[bits]
    rows = (x if owed is None else x + owed).view(-1, size)
    if bits == 1:
        _encode_signs(rows, out, left, counts)
        return
    largest = rows.abs().amax(1, keepdim=True)
    top = torch.full_like(largest, full)  # a number would make a product with its reciprocal of it
    finite, inverse = largest.isfinite(), top / largest
    usable = finite & inverse.isfinite()
    scale = torch.where(usable | ~finite, largest / top, 0)
    codes = torch.where(usable, (rows * inverse).round_(), 0)
    if left is not None:
        left.copy_((rows - codes * scale).view(-1))
    blocks = out.view(len(rows), -1)
    blocks[:, -x.dtype.itemsize :] = scale.view(torch.uint8)
    if bits == 8:
        blocks[:, :size] = codes.to(torch.int8).view(torch.uint8)
    else:
        low, high = codes.add_(8).to(torch.uint8).split(size // 2, 1)
        blocks[:, : size // 2] = high.bitwise_left_shift(4).bitwise_or_(low)


def decode(rows: Tensor, bits: int, out: Tensor, counts: Tensor | None = None) -> None:
    """The sum over the first dim of what ``rows`` of bytes say, in this order, into flat numbers."""
    for index, row in enumerate(rows):
        blocks = row.view(-1, block_bytes(bits, out.dtype))
        scale = blocks[:, -out.dtype.itemsize :].contiguous().view(out.dtype)
        codes = blocks[:, : -out.dtype.itemsize]
        if bits == 8:
            numbers = codes.contiguous().view(torch.int8).to(out.dtype)
        elif bits == 1:
            negative = (codes[:, None] >> EIGHTHS.to(codes.device)) & 1
            numbers = 1 - 2 * negative.view(len(codes), -1).to(out.dtype)
        else:
            numbers = torch.cat([codes & 15, codes >> 4], 1).to(out.dtype).sub_(8)
        numbers = numbers.mul_(scale).view(-1)
        out.add_(numbers) if index else out.copy_(numbers)
    if bits == 1 and counts is not None:
        out.masked_fill_(~_counting(counts), 0)


def _encode_signs(rows: Tensor, out: Tensor, left: Tensor | None, counts: Tensor | None) -> None:
    total = rows.abs()
    while total.shape[1] > 1:
        first, second = total.chunk(2, 1)
        total = first + second
    size = rows.shape[1] if counts is None else counts.clamp(min=1).to(rows.dtype)[:, None]
    scale, negative = total / size, rows < 0
    if left is not None:
        left.copy_((rows - torch.where(negative, -scale, scale)).view(-1))
        if counts is not None:
            left.masked_fill_(~_counting(counts), 0)
    blocks, eighths = out.view(len(rows), -1), negative.view(len(rows), 8, -1).to(torch.uint8)
    blocks[:, -rows.dtype.itemsize :] = scale.view(torch.uint8)
    blocks[:, : -rows.dtype.itemsize] = (eighths << EIGHTHS.to(rows.device)).sum(1, dtype=torch.uint8)


def _counting(counts: Tensor) -> Tensor:
    """Of flat numbers, whether each counts."""
    return (torch.arange(BLOCKS[1], device=counts.device) < counts[:, None]).view(-1)
