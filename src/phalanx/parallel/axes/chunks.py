"""What a chunk's positions see of the keys up to its end: by a kernel that counts back from the last key, or else under
a mask that all blocks share."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.documents import one_document
from phalanx.kernels.packed_attention import packed_kernel, takes
from phalanx.parallel.communication.differentiable import run


class SequenceChunks:
    """Sequences cut into so many, and what each of them sees."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.by_kernel = device.type == "cuda" and packed_kernel.works(device)
        """Whether causal attention is computed without masks, where its numbers are for that."""
        self._masks: dict[int, Tensor] = {}
        """By chunk, what its positions may not see, as attention adds it. For all blocks: each would keep its own."""
        self._length, self._dtype = 0, torch.float32

    def span(self, length: int, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends."""
        return run(length, self.number, index)

    def prepare(self, length: int, dtype: torch.dtype) -> None:
        """Before a block: have what all blocks share of sequences of this length."""
        known, self._length, self._dtype = (self._length, self._dtype), length, dtype
        if self._masks and known != (length, dtype):
            self._masks = {index: self._make_mask(index) for index in self._masks}

    def seen(self, index: int, query: Tensor, value: Tensor) -> Tensor | None:
        """By its queries: None where keys begin with them; where documents begin, each row being one; or a mask."""
        if not self.span(self._length, index)[0]:
            return None
        if self.by_kernel and takes(query, value):
            return one_document(query.shape[0], query.device)
        return self.mask(index, query.dtype)

    def mask(self, index: int, dtype: torch.dtype) -> Tensor:
        """What positions of a chunk may not see."""
        if index not in self._masks:
            self._masks[index] = self._make_mask(index)
        mask = self._masks[index]
        return mask if mask.dtype == dtype else mask.to(dtype)  # attention may be computed in another one

    def _make_mask(self, index: int) -> Tensor:
        start, stop = self.span(self._length, index)
        ahead = torch.full((stop - start, stop), float("-inf"), dtype=self._dtype, device=self.device)
        return ahead.triu(start + 1)
