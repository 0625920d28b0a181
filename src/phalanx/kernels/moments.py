"""Adam's moments in fewer bits, each number by itself, rounded up or down at random so that nothing is lost on average.

bfloat16   both as in float32, without its last 16 bits.
float8     the second moment has 6 bits of exponent and 2 of mantissa, from 2**-55 to 1.5 * 2**9, and no sign. The first
           has a sign, 4 bits of exponent and 3 of mantissa, and is counted in units of about the second's root: their
           ratio is bounded, and is what an update consists of. So neither needs a scale that neighbours share.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Moments = Literal["float32", "bfloat16", "float8"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.uint8}
"""What a tensor of moments has; in float8, codes."""

FIRST_BITS, FIRST_LEAST = 3, -8
SECOND_BITS, SECOND_LEAST = 2, -53
"""Of a mantissa, and the exponent of the smallest number that has all of it: below it steps stay as they are there."""
FIRST_MOST, SECOND_MOST, SECOND_NONE = 127, 254, 255
"""The largest codes; the last of the second moment is no number."""


def widened(first: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Moments as they are computed with, whichever way they are kept; never the same memory."""
    if second.dtype != torch.uint8:
        return first.to(dtype, copy=True), second.to(dtype, copy=True)
    firsts, seconds, units = _tables(second.device)
    m, code = _looked_up(firsts, first.int()), second.int()
    return m.mul_(_looked_up(units, code)).to(dtype), _looked_up(seconds, code).to(dtype)


def narrowed(first: Tensor, second: Tensor, moments: Moments, words: Tensor) -> tuple[Tensor, Tensor]:
    """Moments as they are kept; ``words``: 32 random bits for each, half of them for the first."""
    first, second, low, high = first.float(), second.float(), words & 0xFFFF, (words >> 16).bitwise_and_(0xFFFF)
    if moments == "bfloat16":
        return _shortened(first, low), _shortened(second, high)
    code = _coded(second, SECOND_BITS, SECOND_LEAST, high)
    code = code.clamp_(0, SECOND_MOST).masked_fill_(second - second != 0, SECOND_NONE)
    own = _coded(first * _power(-_unit(code)), FIRST_BITS, FIRST_LEAST, low).clamp_(0, FIRST_MOST)
    return own.add_(first < 0, alpha=128).to(torch.uint8), code.to(torch.uint8)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1)).view(codes.shape)


def _shortened(x: Tensor, draw: Tensor) -> Tensor:
    """To bfloat16: what is cut off is the chance to be rounded away from zero. What is no number stays none."""
    rounded = draw.add_(x.view(torch.int32)).bitwise_and_(~0xFFFF).view(torch.float32)
    return rounded.add_(x - x).bfloat16()


def _coded(x: Tensor, bits: int, least: int, draw: Tensor) -> Tensor:
    """Exponent and mantissa of a magnitude as one integer, which may be too large.

    Codes are as far apart below 2 ** least as just above it, and twice as far with every power of 2 from there on.
    """
    x, cut, whole = x.abs(), 23 - bits, 1 << bits
    few = (x * 2.0 ** (bits - least)).clamp_(max=whole).add_(draw, alpha=2.0**-16).int()
    more = (draw << (cut - 16)).add_(x.view(torch.int32)) >> cut
    return more.sub_((127 + least) << bits).clamp_(min=0).add_(few)


def _unit(code: Tensor) -> Tensor:
    """The exponent of what the first moment is counted in: half of the second's."""
    return ((code >> SECOND_BITS).clamp(min=1) + (SECOND_LEAST - 1)) >> 1


def _power(exponent: Tensor) -> Tensor:
    """Of 2, from its bits: exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """By code: first moments in their units, second moments, and units."""
    firsts = [_value(code, FIRST_BITS, FIRST_LEAST) for code in range(FIRST_MOST + 1)]
    seconds = [_value(code, SECOND_BITS, SECOND_LEAST) for code in range(SECOND_NONE)]
    units = _power(_unit(torch.arange(SECOND_NONE + 1, dtype=torch.int32)))
    first = torch.tensor([*firsts, *(-value for value in firsts)])
    return first.to(device), torch.tensor([*seconds, math.nan]).to(device), units.to(device)


def _value(code: int, bits: int, least: int) -> float:
    exponent, mantissa = divmod(code, 1 << bits)
    if exponent == 0:
        return math.ldexp(mantissa, least - bits)
    return math.ldexp((1 << bits) + mantissa, exponent - 1 + least - bits)
