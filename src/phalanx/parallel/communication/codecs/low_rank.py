"""``powersgd:R``: a matrix as two thin ones, ``P Q'``, of which all ranks sum first the one and then the other.

Columns of ``P`` are what the sum of all ranks' matrices makes of ``Q``, orthogonal to each other and of length 1; the
next ``Q`` is what the sum makes of them. So both are sums, and what all ranks have together is projected on the columns
of ``P``. The rest is owed. ``Q`` is kept: from step to step it turns to what the matrices have most of.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from phalanx.parallel.communication.codecs.codec import Method


class LowRank(Method):
    """Matrices of all buckets travel together: `parallel.weights.low_rank`."""

    feedback, two_hops = True, False

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def takes(self, shape: torch.Size) -> bool:
        """Matrices that become less; what has more dims is one of its first by all others."""
        rows, columns = matrix(shape)
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns


def matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of the matrix that a weight is taken for."""
    rows = shape[0] if shape else 1
    return rows, shape.numel() // max(1, rows)


def first_basis(name: str, columns: int, rank: int) -> Tensor:
    """What ``Q`` of a weight begins with: drawn, the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(columns, rank, dtype=torch.float64, generator=generator)


def orthogonal(matrices: Tensor) -> Tensor:
    """Columns of ``[count, rows, rank]`` made orthogonal to those before them, and of length 1.

    One that lies in what those before it span, but for rounding, becomes nothing. What is not finite stays so.
    """
    found = torch.zeros_like(matrices)
    least = torch.finfo(matrices.dtype).eps ** 0.5
    for number in range(matrices.shape[2]):
        column = matrices[:, :, number : number + 1]
        size = column.norm(dim=1, keepdim=True)
        for _ in range(2):  # a second time for what rounding left
            before = found[:, :, :number]
            column = column - before @ (before.mT @ column)
        rest = column.norm(dim=1, keepdim=True)
        found[:, :, number : number + 1] = torch.where(rest <= least * size, 0, column / rest)
    return found


def direction(basis: Tensor, first: Tensor) -> Tensor:
    """Columns of ``Q`` of length 1; where there is nothing, as at the beginning, those it begins with."""
    size = basis.norm(dim=-2, keepdim=True)
    return torch.where(size == 0, first, basis / size)
