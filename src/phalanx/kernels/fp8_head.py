"""The gradients of a linear cross-entropy as products in 8 bits.

The gradient by a logit is at most 1 in size, so that its scale is known. Several chunks of it are kept until they are
multiplied by the hidden states: a product over few rows reads and writes the head's gradient for longer than it
computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.kernels import fp8

SCALE = float(1 << 15)
"""Of gradients by logits."""
CHUNKS = 4
"""That are kept."""


class HeadGradients:
    """By hidden states and by the weight, a chunk of rows after another."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunks: Sequence[slice]) -> None:
        self.rows, self.classes, self.dtype = len(hidden), len(weight), hidden.dtype
        self.fit = self.classes > 0 and fp8.fits(len(hidden), *weight.shape, *(part.start for part in chunks))
        """Whether sizes are such that 8 bits are used at all."""
        if not self.fit:
            return
        (self.hidden, self.by_hidden), (self.weight, self.by_weight) = _columns(hidden), _columns(weight)
        self.by_logits = torch.full((), 1 / SCALE, device=hidden.device)
        each = min(self.rows, chunks[0].stop)
        self.kept = hidden.new_empty(self.classes, min(self.rows, CHUNKS * each), dtype=fp8.WIDE)
        """Of the last chunks, transposed: ``[classes, rows]``."""
        self.first = 0
        """The row that these begin with."""
        self._room = hidden.new_empty(each, self.classes, dtype=fp8.WIDE)

    def room(self, part: slice) -> Tensor:
        """For the gradient by logits of some rows, in 8 bits, times `SCALE`."""
        return self._room[: min(part.stop, self.rows) - part.start]

    def products(self, part: slice, by_logits: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """By these rows of the hidden states; and what is added up by the weight, where it is time to do so."""
        stop = part.start + len(by_logits)
        fp8.transpose_into(by_logits, self.kept[:, part.start - self.first : stop - self.first])
        by_rows = fp8.product(by_logits, self.weight, self.by_logits, self.by_weight, self.dtype)
        if stop == self.rows or stop - self.first == self.kept.shape[1]:
            rows = self.hidden[:, self.first : stop]
            product = fp8.product(
                self.kept[:, : stop - self.first], rows, self.by_logits, self.by_hidden, torch.float32
            )
            total = product if total is None else total.add_(product)
            self.first = stop
        return by_rows, total


def _columns(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix transposed in 8 bits, and what its numbers are to be multiplied by.

    The scale is a power of 2, which rounds nothing: so it can be applied as narrow as numbers are, without a compiler.
    """
    low, high = tensor.aminmax()
    largest = torch.maximum(-low, high).float().clamp_min(1e-30)
    scale = torch.exp2(torch.log2(torch.finfo(fp8.FINE).max / largest).floor())
    return fp8.transposed((tensor * scale.to(tensor.dtype)).to(fp8.FINE))[0], 1 / scale
