"""``int8`` and ``int4``: codes of few bits, and a scale a block."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels import blockwise
from phalanx.kernels.blockwise_choice import fastest
from phalanx.parallel.communication.codecs.codec import Codec

UNEVEN = 1 / 16
"""By so much a gradient's ``full`` is less than the largest code: else a sum of few codes is often just half of the
largest, which would lie half way between two codes, and be rounded by its last bit."""


class Blockwise(Codec):
    """A quarter of float32's bytes and a little, or an eighth. What 4 bits do not say is owed."""

    def __init__(self, bits: int, full: float = 0.0) -> None:
        """``full``: what a block's largest number is before it is rounded to a code."""
        self.bits, self.block, self.feedback = bits, blockwise.BLOCKS[bits], bits < 8
        self.full = full or blockwise.FULL[bits]

    def size(self, numbers: int, dtype: torch.dtype) -> int:
        return numbers // self.block * blockwise.block_bytes(self.bits, dtype)

    def encode(self, x: Tensor, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None) -> None:
        fastest(x).encode(x, self.bits, self.full, out, owed, left)

    def decode(self, rows: Tensor, out: Tensor) -> None:
        fastest(out).decode(rows, self.bits, out)
