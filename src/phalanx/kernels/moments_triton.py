"""Moments in fewer bits as a kernel reads and writes them: what `moments` does, and the draws of `phalanx.counter`."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels import moments as plain

STRIDE, CALL = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xD1B54A32D192ED03)
MIX_FIRST, MIX_SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
FIRST_BITS, FIRST_LEAST = tl.constexpr(plain.FIRST_BITS), tl.constexpr(plain.FIRST_LEAST)
SECOND_BITS, SECOND_LEAST = tl.constexpr(plain.SECOND_BITS), tl.constexpr(plain.SECOND_LEAST)
FIRST_MOST, SECOND_MOST = tl.constexpr(plain.FIRST_MOST), tl.constexpr(plain.SECOND_MOST)
SECOND_NONE = tl.constexpr(plain.SECOND_NONE)
FIRST_FEW, SECOND_FEW = tl.constexpr(1 << plain.FIRST_BITS), tl.constexpr(1 << plain.SECOND_BITS)
"""Codes below these are as far apart as they are large:"""
FIRST_STEP = tl.constexpr(2.0 ** (plain.FIRST_LEAST - plain.FIRST_BITS))
SECOND_STEP = tl.constexpr(2.0 ** (plain.SECOND_LEAST - plain.SECOND_BITS))
FIRST_SCALE, SECOND_SCALE = tl.constexpr(1 / FIRST_STEP.value), tl.constexpr(1 / SECOND_STEP.value)


@triton.jit
def stream(key, number):  # type: ignore[no-untyped-def]
    """What the draws of a weight's update of this number are keyed by."""
    return _mixed(key.to(tl.uint64, bitcast=True) + number.to(tl.uint64) * CALL)


@triton.jit
def words(key, index):  # type: ignore[no-untyped-def]
    """32 random bits for each element of a whole weight."""
    raw = _mixed(((index >> 1) + 1).to(tl.uint64) * STRIDE + key)
    return (raw >> ((index & 1) * 32).to(tl.uint64)).to(tl.uint32)


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * MIX_FIRST
    x = (x ^ (x >> 27)) * MIX_SECOND
    return x ^ (x >> 31)


@triton.jit
def shortened(x, draw):  # type: ignore[no-untyped-def]
    """To what bfloat16 has, by 16 random bits."""
    rounded = (x.to(tl.uint32, bitcast=True) + draw) & 0xFFFF0000
    return (rounded.to(tl.float32, bitcast=True) + (x - x)).to(tl.bfloat16)


@triton.jit
def first_value(code, second):  # type: ignore[no-untyped-def]
    """Of a first moment's code, beside that of its second."""
    size = _value(code & FIRST_MOST, FIRST_BITS, FIRST_LEAST, FIRST_FEW, FIRST_STEP) * _power(_unit(second))
    return tl.where(code > FIRST_MOST, -size, size)


@triton.jit
def second_value(code):  # type: ignore[no-untyped-def]
    return tl.where(code == SECOND_NONE, float("nan"), _value(code, SECOND_BITS, SECOND_LEAST, SECOND_FEW, SECOND_STEP))


@triton.jit
def first_code(x, second, draw):  # type: ignore[no-untyped-def]
    ratio = tl.abs(x * _power(-_unit(second)))
    code = _coded(ratio, draw, FIRST_BITS, FIRST_LEAST, FIRST_FEW, FIRST_SCALE)
    code = tl.minimum(tl.maximum(code, 0), FIRST_MOST)
    return tl.where(x < 0, code + 128, code)


@triton.jit
def second_code(x, draw):  # type: ignore[no-untyped-def]
    code = _coded(x, draw, SECOND_BITS, SECOND_LEAST, SECOND_FEW, SECOND_SCALE)
    return tl.where(x - x == 0, tl.minimum(tl.maximum(code, 0), SECOND_MOST), SECOND_NONE)


@triton.jit
def _coded(  # type: ignore[no-untyped-def]
    x, draw, BITS: tl.constexpr, LEAST: tl.constexpr, FEW: tl.constexpr, SCALE: tl.constexpr
):
    """Of a magnitude, by 16 random bits; it may be too large."""
    draw = draw.to(tl.int32)
    few = (tl.minimum(x * SCALE, FEW) + draw.to(tl.float32) * (1 / 65536)).to(tl.int32)
    more = ((draw << (7 - BITS)) + x.to(tl.int32, bitcast=True)) >> (23 - BITS)
    return tl.maximum(more - ((127 + LEAST) << BITS), 0) + few


@triton.jit
def _value(  # type: ignore[no-untyped-def]
    code, BITS: tl.constexpr, LEAST: tl.constexpr, FEW: tl.constexpr, STEP: tl.constexpr
):
    many = ((code + ((126 + LEAST) << BITS)) << (23 - BITS)).to(tl.float32, bitcast=True)
    return tl.where(code < FEW, code.to(tl.float32) * STEP, many)


@triton.jit
def _unit(code):  # type: ignore[no-untyped-def]
    """The exponent of what a first moment is counted in, by the second's code."""
    return (tl.maximum(code >> SECOND_BITS, 1) + (SECOND_LEAST - 1)) >> 1


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
