"""Weights in 4 bits, as QLoRA keeps them: NF4 in blocks of 64, whose scales are kept in 8 bits themselves.

The table of 16 values, the blocks and the order of the halves of a byte are bitsandbytes'. Scales of blocks have their
mean taken off and are divided by the largest of 256. Those few real numbers are kept as whole ones, mantissa and
exponent: what is real is computed with in the run's dtype, and 8 bits of a mantissa would be too few for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.nf4 import BLOCK, CODE, widened

SCALES, LARGEST, MANTISSA = 256, 127, 1 << 24


class FourBits(NamedTuple):
    """A weight of which two elements share a byte, the first in its upper half."""

    packed: Tensor
    """uint8: two elements each."""
    absmax: Tensor
    """int8: of each block, what it is multiplied by."""
    scales: Tensor
    """int32, mantissas and exponents: of each 256 of these, what they are multiplied by; and last, what is added."""


def quantised(weight: Tensor) -> FourBits:
    """The nearest values of the table."""
    flat = weight.detach().to(torch.float32).reshape(-1)
    flat = F.pad(flat, (0, -len(flat) % BLOCK))
    blocks = flat.reshape(-1, BLOCK)
    largest = blocks.abs().amax(1)
    between = torch.tensor([(a + b) / 2 for a, b in pairwise(CODE)], device=weight.device)
    found = torch.bucketize(blocks / largest.clamp_min(1e-30).unsqueeze(1), between).reshape(-1, 2)
    packed = (found[:, 0] * 16 + found[:, 1]).to(torch.uint8)
    mean = largest.mean()
    rest = F.pad(largest - mean, (0, -len(largest) % SCALES)).reshape(-1, SCALES)
    scale = rest.abs().amax(1)
    absmax = (rest / scale.clamp_min(1e-30).unsqueeze(1) * LARGEST).round().to(torch.int8).reshape(-1)
    mantissa, exponent = torch.frexp(torch.cat([scale, mean.reshape(1)]))
    scales = torch.stack([(mantissa * MANTISSA).to(torch.int32), exponent.to(torch.int32)])
    return FourBits(packed, absmax[: len(largest)], scales)


@dataclass(frozen=True)
class Divided:
    """What a rank computes with of a matrix that others have the rest of."""

    dim: int
    spans: tuple[tuple[int, int], ...]
    """Of this dim."""
    cut: bool
    """Its bits are those of these rows alone, whole blocks; otherwise of the whole matrix."""

    def blocks(self, columns: int, device: torch.device) -> Tensor:
        """The numbers, in the whole, of the blocks that are here."""
        each = columns // BLOCK
        return torch.cat([torch.arange(a * each, b * each, device=device) for a, b in self.spans])

    def of(self, bits: FourBits, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The part, as a weight again; ``shape``: of the whole."""
        if self.cut:
            rows = sum(stop - start for start, stop in self.spans)
            return dequantised(bits, (rows, shape[1]), dtype, self.blocks(shape[1], bits.packed.device))
        whole = dequantised(bits, shape, dtype)
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.spans], self.dim)


def dequantised(
    bits: FourBits, shape: tuple[int, ...], dtype: torch.dtype, blocks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """A weight again, in another dtype; ``blocks``: which of the whole's these are, if not all."""
    real = torch.ldexp(bits.scales[0].to(torch.float32) / MANTISSA, bits.scales[1])
    largest = bits.absmax.to(torch.float32) / LARGEST
    blocks = torch.arange(len(largest), device=largest.device) if blocks is None else blocks
    largest = largest * real[:-1][blocks // SCALES] + real[-1]
    found = widened(bits.packed, largest, dtype)
    return found[: torch.Size(shape).numel()].view(shape)


class _Product(torch.autograd.Function):
    """A product with a weight in 4 bits: it is a whole weight while it is multiplied with, and never kept as one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        absmax: Tensor,
        scales: Tensor,
        shape: tuple[int, int],
        part: Divided | None,
    ) -> Tensor:
        ctx.save_for_backward(packed, absmax, scales)
        ctx.shape, ctx.part = shape, part
        return F.linear(x, _weight(FourBits(packed, absmax, scales), shape, part, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        weight = _weight(FourBits(*ctx.saved_tensors), ctx.shape, ctx.part, gradient.dtype)
        return gradient @ weight, None, None, None, None, None


def _weight(bits: FourBits, shape: tuple[int, int], part: Divided | None, dtype: torch.dtype) -> Tensor:
    return dequantised(bits, shape, dtype) if part is None else part.of(bits, shape, dtype)


def product(x: Tensor, bits: FourBits, shape: tuple[int, int], part: Divided | None = None) -> Tensor:
    """What a linear with such a weight, or a part of it, makes of its input, without a bias."""
    found: Tensor = _Product.apply(x, *bits, shape, part)
    return found
