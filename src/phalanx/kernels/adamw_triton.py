"""Adam's update of many weights in one launch, which reads and writes all that it needs once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.moments_triton import first_code, first_value, second_code, second_value, shortened, stream, words

if TYPE_CHECKING:
    from phalanx.kernels.adamw import Compiled

BLOCK = 1024
SPAN = 8 * BLOCK
"""What one program updates."""


def update(
    places: Tensor, spans: Tensor, numbers: tuple[float, ...], step: int, kind: Compiled, decoupled: bool
) -> None:
    """``places``: ``[segments, 10]``, what `Updated.rows` gives; ``spans``: ``[programs, 2]``, which of them, where."""
    _update[(len(spans),)](
        places, spans, *numbers, step, GRADIENT=TYPES[kind.gradient], COPY=TYPES.get(kind.copy),
        MOMENTS=TYPES[kind.moments], TOGETHER=kind.together, DECOUPLED=decoupled, EVEN=kind.even,
        BLOCK=BLOCK, SPAN=SPAN, num_warps=4,
    )  # fmt: skip


TYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32, "uint8": tl.uint8}


@triton.jit
def _address(row, place, TYPE: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(row + place).to(tl.pointer_type(TYPE))
    return tl.multiple_of(address, 16) if EVEN else address


@triton.jit
def _drawn(row, at, step, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    """32 random bits for elements, by their places in the whole weight."""
    index = at
    if not TOGETHER:
        run = tl.load(row + 8)
        index = at // run * tl.load(row + 9) + at % run
    return words(stream(tl.load(row + 6), step), tl.load(row + 7) + index)


@triton.jit(do_not_specialize=["step"])
def _update(  # type: ignore[no-untyped-def]
    places, spans, factor, rate, add_first, add_second, keep_second, tiny, decay, first_share, second_root, step,
    GRADIENT: tl.constexpr, COPY: tl.constexpr, MOMENTS: tl.constexpr, TOGETHER: tl.constexpr,
    DECOUPLED: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A span of a weight a program."""
    program = tl.program_id(0).to(tl.int64)
    row = places + 10 * tl.load(spans + 2 * program).to(tl.int64)
    begin = tl.load(spans + 2 * program + 1).to(tl.int64) * SPAN
    weight, gradient = _address(row, 0, tl.float32, EVEN), _address(row, 1, GRADIENT, EVEN)
    first, second = _address(row, 2, MOMENTS, EVEN), _address(row, 3, MOMENTS, EVEN)
    size = tl.load(row + 5)
    if EVEN:
        size = tl.multiple_of(size, 16)
    for start in range(0, SPAN, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        here = at < size
        x = tl.load(weight + at, mask=here)
        slope = tl.load(gradient + at, mask=here).to(tl.float32) * factor
        if DECOUPLED:
            x *= 1 - rate * decay
        else:
            slope += decay * x
        m = tl.load(first + at, mask=here)
        v = tl.load(second + at, mask=here)
        if tl.uint8 == MOMENTS:
            m = first_value(m.to(tl.int32), v.to(tl.int32))
            v = second_value(v.to(tl.int32))
        else:
            m = m.to(tl.float32)
            v = v.to(tl.float32)
        m += add_first * (slope - m)
        v = keep_second * v + add_second * slope * slope
        x -= first_share * m / (tl.sqrt(v) / second_root + tiny)
        tl.store(weight + at, x, mask=here)
        if tl.float32 != MOMENTS:
            drawn = _drawn(row, at, step, TOGETHER)
            low, high = drawn & 0xFFFF, drawn >> 16
            if tl.uint8 == MOMENTS:
                v = second_code(v, high)
                m = first_code(m, v, low).to(tl.uint8)
                v = v.to(tl.uint8)
            else:
                m = shortened(m, low)
                v = shortened(v, high)
        tl.store(first + at, m, mask=here)
        tl.store(second + at, v, mask=here)
        if COPY is not None:
            tl.store(_address(row, 4, COPY, EVEN) + at, x.to(COPY), mask=here)
