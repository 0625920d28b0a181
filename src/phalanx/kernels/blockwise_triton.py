"""`blockwise` on a GPU, in one pass over memory: the plain twin is in `kernels.blockwise`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.blockwise import BLOCKS, block_bytes

ROWS = 8
"""Blocks that a program does at once."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: what is added to it is rounded to a whole number, halves to even."""
INFINITE = tl.constexpr(0x7F800000)


def encode(
    x: Tensor, bits: int, full: float, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    """See the twin. A product and a sum are not made one, which would round once where the twin rounds twice."""
    blocks = len(x) // BLOCKS[bits]
    if bits == 1:
        _encode_signs[(blocks,)](
            x, x if owed is None else owed, x if left is None else left, out, x if counts is None else counts,
            SIZE=BLOCKS[1], BYTES=block_bytes(1, x.dtype), OWED=owed is not None, LEFT=left is not None,
            COUNTS=counts is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return
    _encode[(triton.cdiv(blocks, ROWS),)](
        x, x if owed is None else owed, x if left is None else left, out, blocks, full, HALF=BLOCKS[bits] // 2,
        BITS=bits, BYTES=block_bytes(bits, x.dtype), OWED=owed is not None, LEFT=left is not None, ROWS=ROWS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def decode(rows: Tensor, bits: int, out: Tensor, counts: Tensor | None = None) -> None:
    """See the twin."""
    blocks = len(out) // BLOCKS[bits]
    if bits == 1:
        _decode_signs[(blocks,)](
            rows, out, out if counts is None else counts, blocks, COUNT=len(rows), SIZE=BLOCKS[1],
            BYTES=block_bytes(1, out.dtype), COUNTS=counts is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return
    _decode[(triton.cdiv(blocks, ROWS),)](
        rows, out, blocks, COUNT=len(rows), HALF=BLOCKS[bits] // 2, BITS=bits, BYTES=block_bytes(bits, out.dtype),
        ROWS=ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    x, owed, left, out, blocks, full, HALF: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, OWED: tl.constexpr,
    LEFT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    here = block < blocks
    column = tl.arange(0, HALF)[None, :]
    first = block * (2 * HALF) + column
    low, high = tl.load(x + first, mask=here, other=0.0), tl.load(x + first + HALF, mask=here, other=0.0)
    if OWED:
        low += tl.load(owed + first, mask=here, other=0.0)
        high += tl.load(owed + first + HALF, mask=here, other=0.0)
    word = tl.maximum(_magnitude(low), _magnitude(high))  # what is no number is larger than all that are
    word = tl.max(word, axis=1, keep_dims=True)
    largest = word.to(tl.float32, bitcast=True)
    top = tl.zeros_like(largest) + full
    inverse = tl.div_rn(top, largest)
    finite = word < INFINITE
    usable = finite & (_magnitude(inverse) < INFINITE)
    scale = tl.where(usable | (word >= INFINITE), tl.div_rn(largest, top), 0.0)
    low_code = tl.where(usable, (low * inverse + ROUND) - ROUND, 0.0)
    high_code = tl.where(usable, (high * inverse + ROUND) - ROUND, 0.0)
    if LEFT:
        tl.store(left + first, low - low_code * scale, mask=here)
        tl.store(left + first + HALF, high - high_code * scale, mask=here)
    to = out + block * BYTES
    if BITS == 8:
        tl.store(to + column, low_code.to(tl.int32).to(tl.uint8), mask=here)
        tl.store(to + HALF + column, high_code.to(tl.int32).to(tl.uint8), mask=here)
    else:
        both = (low_code.to(tl.int32) + 8) | ((high_code.to(tl.int32) + 8) << 4)
        tl.store(to + column, both.to(tl.uint8), mask=here)
    tl.store((to + (BYTES - 4)).to(tl.pointer_type(tl.float32)), scale, mask=here)


@triton.jit
def _magnitude(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    rows, out, blocks, COUNT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    here = block < blocks
    column = tl.arange(0, HALF)[None, :]
    low, high = _said(rows + block * BYTES, column, here, HALF, BITS, BYTES)
    for row in range(1, COUNT):
        more, most = _said(rows + (blocks * row + block) * BYTES, column, here, HALF, BITS, BYTES)
        low, high = low + more, high + most
    first = block * (2 * HALF) + column
    tl.store(out + first, low, mask=here)
    tl.store(out + first + HALF, high, mask=here)


@triton.jit
def _said(at, column, here, HALF: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of what some blocks say."""
    scale = tl.load((at + (BYTES - 4)).to(tl.pointer_type(tl.float32)), mask=here, other=0.0)
    codes = tl.load(at + column, mask=here, other=0)
    if BITS == 8:
        low = codes.to(tl.int8, bitcast=True).to(tl.float32)
        high = tl.load(at + HALF + column, mask=here, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        low = ((codes & 15).to(tl.int32) - 8).to(tl.float32)
        high = ((codes >> 4).to(tl.int32) - 8).to(tl.float32)
    return low * scale, high * scale


@triton.jit
def _encode_signs(  # type: ignore[no-untyped-def]
    x, owed, left, out, counts, SIZE: tl.constexpr, BYTES: tl.constexpr, OWED: tl.constexpr, LEFT: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    values = tl.load(x + block * SIZE + column)
    if OWED:
        values += tl.load(owed + block * SIZE + column)
    total = _halves(tl.abs(values), SIZE // 2)
    total = _halves(total, SIZE // 4)
    total = _halves(total, SIZE // 8)
    total = _halves(total, SIZE // 16)
    total = _halves(total, SIZE // 32)
    total = _halves(total, SIZE // 64)
    total = _halves(total, SIZE // 128)
    total = _halves(total, SIZE // 256)
    total = _halves(total, SIZE // 512)
    count = tl.load(counts + block) if COUNTS else SIZE
    scale = tl.div_rn(tl.sum(total, axis=0), tl.maximum(count, 1).to(tl.float32))  # of the last two
    if LEFT:
        rest = values - tl.where(values < 0, -scale, scale)
        tl.store(left + block * SIZE + column, tl.where(column < count, rest, 0.0))
    negative = tl.reshape((values < 0).to(tl.int32), (8, SIZE // 8))
    codes = tl.sum(negative << tl.arange(0, 8)[:, None], axis=0)
    to = out + block * BYTES
    tl.store(to + tl.arange(0, SIZE // 8), codes.to(tl.uint8))
    tl.store((to + (BYTES - 4)).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def _halves(x, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first half added to the second."""
    return tl.sum(tl.reshape(x, (2, HALF)), axis=0)


@triton.jit
def _decode_signs(  # type: ignore[no-untyped-def]
    rows, out, counts, blocks, COUNT: tl.constexpr, SIZE: tl.constexpr, BYTES: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    byte, bit = tl.arange(0, SIZE // 8)[None, :], tl.arange(0, 8)[:, None]
    total = _signed(rows + block * BYTES, byte, bit, BYTES)
    for row in range(1, COUNT):
        total += _signed(rows + (blocks * row + block) * BYTES, byte, bit, BYTES)
    column = bit * (SIZE // 8) + byte
    if COUNTS:
        total = tl.where(column < tl.load(counts + block), total, 0.0)
    tl.store(out + block * SIZE + column, total)


@triton.jit
def _signed(at, byte, bit, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load((at + (BYTES - 4)).to(tl.pointer_type(tl.float32)))
    negative = (tl.load(at + byte).to(tl.int32) >> bit) & 1
    return tl.where(negative == 1, -scale, scale)
