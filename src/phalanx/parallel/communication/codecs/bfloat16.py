"""``bf16``: numbers without their last 16 bits; sums are as wide as gradients are."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel.communication.codecs.codec import Codec


class Bfloat16(Codec):
    """Half the bytes of float32. What is lost is a number's own rounding, and is not ``left``."""

    def size(self, numbers: int, dtype: torch.dtype) -> int:
        return 2 * numbers

    def encode(
        self, x: Tensor, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None, at: int = 0
    ) -> None:
        out.view(torch.bfloat16).copy_(x if owed is None else x + owed)

    def decode(self, rows: Tensor, out: Tensor, at: int = 0) -> None:
        for index, row in enumerate(rows.view(torch.bfloat16)):
            out.add_(row) if index else out.copy_(row)
