"""Numbers in 8 or 4 bits, block by block: codes, and one scale for all codes of a block.

    block   codes, one or half a byte each, and then the scale, as wide as the numbers

A code is a number divided by the scale and rounded to the nearest, halves to even; the scale is the block's largest
number by ``full``, which rounds to the largest code. Of two codes that share a byte, the lower half of it is of the
first half of the block. A block with a number that is not finite becomes one of which none is.

Here everything is made of torch's operations. What is faster gives the same bits: on a processor `blockwise_cpu`, on a
GPU `blockwise_triton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = {8: 256, 4: 128}
"""By bits: numbers in a block."""
FULL = {8: 127.0, 4: 7.0}
"""By bits: the largest code."""


def block_bytes(bits: int, dtype: torch.dtype) -> int:
    """Of one block of numbers of this dtype."""
    return BLOCKS[bits] * bits // 8 + dtype.itemsize


def encode(
    x: Tensor, bits: int, full: float, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None
) -> None:
    """Put the blocks of flat numbers, as many as fill blocks, into ``out``, flat bytes.

    ``owed`` is added to the numbers first. ``left`` takes what codes do not say of them; it may be ``owed``.
    """
    size = BLOCKS[bits]
    rows = (x if owed is None else x + owed).view(-1, size)
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


def decode(rows: Tensor, bits: int, out: Tensor) -> None:
    """The sum over the first dim of what ``rows`` of bytes say, in this order, into flat numbers."""
    for index, row in enumerate(rows):
        blocks = row.view(-1, block_bytes(bits, out.dtype))
        scale = blocks[:, -out.dtype.itemsize :].contiguous().view(out.dtype)
        codes = blocks[:, : -out.dtype.itemsize]
        if bits == 8:
            numbers = codes.contiguous().view(torch.int8).to(out.dtype)
        else:
            numbers = torch.cat([codes & 15, codes >> 4], 1).to(out.dtype).sub_(8)
        numbers = numbers.mul_(scale).view(-1)
        out.add_(numbers) if index else out.copy_(numbers)
