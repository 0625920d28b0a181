"""The sum of all squares of many tensors, for the norm of a step's gradients, in one launch for each dtype.

Its plain twin is torch's norm of each of them, squared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.kernels.choice import Kernel
from phalanx.kernels.tables import Tables


class SumOfSquares:
    """Of the same tensors again and again, wherever they lie by then."""

    def __init__(self) -> None:
        self._tables = Tables()

    def sum(self, tensors: Sequence[Tensor], which: int = 0) -> Tensor:
        """In float64. Each of them `suits`, and all are on one device. ``which``: of several lots of tensors."""
        kinds: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
        for tensor in tensors:
            place, size = tensor.data_ptr(), tensor.numel()
            kinds.setdefault((tensor.dtype, place % 16 == 0 and size % 16 == 0), []).append((place, size))
        found = [self._of_kind((which, dtype, even), rows, tensors[0].device) for (dtype, even), rows in kinds.items()]
        return torch.cat(found).sum(dtype=torch.float64)

    def _of_kind(
        self, kind: tuple[int, torch.dtype, bool], rows: list[tuple[int, int]], device: torch.device
    ) -> Tensor:
        from phalanx.kernels.squares_triton import SPAN, squares  # triton takes longer to import than all of us

        places, spans = self._tables.told(kind, rows, [size for _, size in rows], SPAN, device)
        found = torch.empty(len(spans), dtype=torch.float32, device=device)
        if len(spans):
            squares(places, spans, found, *kind[1:])
        return found


def suits(tensor: Tensor) -> bool:
    """Whether the kernel reads it: elements are neighbours in memory, in whatever order."""
    of_one_piece = tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous())
    return of_one_piece and KERNEL.used(tensor)


def _trial(device: torch.device) -> bool:
    numbers = torch.linspace(-3, 3, 40, device=device)
    tensors = [numbers, numbers[3:], numbers.bfloat16()]
    right = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return abs(float(SumOfSquares().sum(tensors)) - right) < 1e-5 * right


KERNEL = Kernel.declared("sums of squares", _trial)
