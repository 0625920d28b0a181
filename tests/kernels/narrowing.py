"""Kernels of tests: what `moments_triton` draws, reads and writes, each by itself."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.moments_triton import (
    first_code,
    first_value,
    second_code,
    second_value,
    shortened,
    stream,
    words,
)


@triton.jit(do_not_specialize=["first", "number"])
def draw(keys, found, first, number, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The draws of elements from the ``first`` on."""
    at = tl.arange(0, SIZE)
    key = stream(tl.load(keys), number)
    tl.store(found + at, words(key, first + at.to(tl.int64)).to(tl.int32, bitcast=True))


@triton.jit
def narrow(firsts, seconds, drawn, short, codes, wide, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Moments in bfloat16, as codes, and what codes stand for."""
    at = tl.arange(0, SIZE)
    m, v, bits = tl.load(firsts + at), tl.load(seconds + at), tl.load(drawn + at).to(tl.uint32, bitcast=True)
    tl.store(short + at, shortened(m, bits & 0xFFFF))
    tl.store(short + SIZE + at, shortened(v, bits >> 16))
    second = second_code(v, bits >> 16)
    first = first_code(m, second, bits & 0xFFFF)
    tl.store(codes + at, first.to(tl.uint8))
    tl.store(codes + SIZE + at, second.to(tl.uint8))
    tl.store(wide + at, first_value(first, second))
    tl.store(wide + SIZE + at, second_value(second))
