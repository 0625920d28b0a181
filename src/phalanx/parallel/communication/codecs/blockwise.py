"""``int8``, ``int4`` and the signs of ``onebit``: codes of few bits, and a scale a block."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.kernels import blockwise
from phalanx.kernels.blockwise_choice import fastest
from phalanx.parallel.communication.codecs.codec import Codec

UNEVEN = 1 / 16
"""By so much a gradient's ``full`` is less than the largest code: else a sum of few codes is often just half of the
largest, which would lie half way between two codes, and be rounded by its last bit."""


class Blockwise(Codec):
    """A quarter of float32's bytes and a little, an eighth, or a 31st. What 4 bits or one do not say is owed."""

    counts: Tensor | None = None
    """Of each block of a row, the numbers that are no padding: a mean is of them alone."""

    def __init__(self, bits: int, full: float = 0.0) -> None:
        """``full``: what a block's largest number is before it is rounded to a code."""
        self.bits, self.block, self.feedback = bits, blockwise.BLOCKS[bits], bits < 8
        self.full = full or blockwise.FULL[bits]

    def size(self, numbers: int, dtype: torch.dtype) -> int:
        return numbers // self.block * blockwise.block_bytes(self.bits, dtype)

    def for_rows(self, counts: Callable[[], Tensor]) -> Blockwise:
        if self.bits > 1:
            return self
        found = copy.copy(self)
        found.counts = counts()
        return found

    def encode(
        self, x: Tensor, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None, at: int = 0
    ) -> None:
        fastest(x).encode(x, self.bits, self.full, out, owed, left, self._counts(x, at))

    def decode(self, rows: Tensor, out: Tensor, at: int = 0) -> None:
        fastest(out).decode(rows, self.bits, out, self._counts(out, at))

    def _counts(self, x: Tensor, at: int) -> Tensor | None:
        return None if self.counts is None else self.counts[at // self.block : (at + len(x)) // self.block]
