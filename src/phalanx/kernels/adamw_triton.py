"""Adam's update of many weights in one launch, which reads and writes all that it needs once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
SPAN = 8 * BLOCK
"""What one program updates."""


def update(
    places: Tensor, spans: Tensor, numbers: tuple[float, ...], gradient: str, copy: str, decoupled: bool, even: bool
) -> None:
    """``places``: ``[weights, 6]``, the addresses of weight, gradient, both moments and copy, and how many elements;

    ``spans``: ``[programs, 2]``, which weight, and which span of it; ``even``: addresses and sizes are multiples of 16.
    """
    _update[(len(spans),)](
        places, spans, *numbers, GRADIENT=TYPES[gradient], COPY=TYPES.get(copy), DECOUPLED=decoupled, EVEN=even,
        BLOCK=BLOCK, SPAN=SPAN, num_warps=4,
    )  # fmt: skip


TYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


@triton.jit
def _address(row, place, TYPE: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(row + place).to(tl.pointer_type(TYPE))
    return tl.multiple_of(address, 16) if EVEN else address


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    places, spans, factor, rate, add_first, add_second, keep_second, tiny, decay, first_share, second_root,
    GRADIENT: tl.constexpr, COPY: tl.constexpr, DECOUPLED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A span of a weight a program."""
    program = tl.program_id(0).to(tl.int64)
    row = places + 6 * tl.load(spans + 2 * program).to(tl.int64)
    begin = tl.load(spans + 2 * program + 1).to(tl.int64) * SPAN
    weight, gradient = _address(row, 0, tl.float32, EVEN), _address(row, 1, GRADIENT, EVEN)
    first, second = _address(row, 2, tl.float32, EVEN), _address(row, 3, tl.float32, EVEN)
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
        m += add_first * (slope - m)
        v = keep_second * v + add_second * slope * slope
        x -= first_share * m / (tl.sqrt(v) / second_root + tiny)
        tl.store(weight + at, x, mask=here)
        tl.store(first + at, m, mask=here)
        tl.store(second + at, v, mask=here)
        if COPY is not None:
            tl.store(_address(row, 4, COPY, EVEN) + at, x.to(COPY), mask=here)
