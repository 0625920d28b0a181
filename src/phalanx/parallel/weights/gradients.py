"""A step's gradients, summed over all ranks: measured, and scaled for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from phalanx.kernels.squares import SumOfSquares, suits
from phalanx.parallel.communication import exact
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.torch_private import norms
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.weight import Weight

ROW = 4096
"""So many elements are summed in the dtype of the gradients before float64 takes over."""


class Gradients:
    """Of the rows of all buckets that this rank owns."""

    def __init__(self, buckets: Sequence[Bucket], holding: Holding, mesh: Mesh, like: Tensor) -> None:
        """``like``: on the device, in the dtype in which gradients are summed."""
        self.buckets = [bucket for bucket in buckets if bucket.trainable]
        self.holding, self.mesh, self.like = holding, mesh, like
        self._squares = SumOfSquares()

    def each(self) -> Iterator[tuple[Weight, Tensor]]:
        """Every trainable weight of this rank, and the summed gradient of the rows that it owns."""
        for bucket in self.buckets:
            for weight in bucket.trainable:
                yield weight, bucket.gradient_own(weight)

    def complete(self) -> None:
        """After the last action: sum those of weights that ranks of ``tp`` or ``pp`` hold and have parts of."""
        if self._divided:
            self.holding.complete([(weight.name, own) for weight, own in self.each()], self.like)

    def norm_squared(self) -> Tensor:
        """This rank's part of the squared norm of all gradients; the parts of all ranks add up to it."""
        owned = self._owned()
        if self._divided:
            owned = [own for weight, own in self.each() if self.holding.counts(weight.name)]
        return self._squared(owned)

    def norms_squared(self, groups: Sequence[Set[str]]) -> Tensor:
        """The same of each of these groups of weights."""
        found: list[list[Tensor]] = [[] for _ in groups]
        for weight, own in self.each() if groups else ():
            if not self._divided or self.holding.counts(weight.name):
                for members, pieces in zip(groups, found, strict=True):
                    pieces += [own] if weight.name in members else []
        none = self.like.new_zeros(0, dtype=torch.float64)
        return torch.cat([none, *(self._squared(pieces, which)[None] for which, pieces in enumerate(found, 1))])

    def _squared(self, pieces: list[Tensor], which: int = 0) -> Tensor:
        """``which``: 0 of all gradients, or a group's number."""
        if not pieces:
            return self.like.new_zeros((), dtype=torch.float64)
        fused = all(map(suits, pieces))
        total = self._squares.sum(pieces, which) if fused else sum_of_squares(pieces, self.like.dtype)
        return total / self.mesh.size("dp")

    def exact_norm(self, largest: float, members: Set[str] | None = None) -> float:
        """The norm of all gradients, none of which is above ``largest``, to the same bits at any number of ranks.

        ``members``: of these weights alone.
        """
        squares = exact.Squares(largest, sum(w.shape.numel() for bucket in self.buckets for w in bucket.trainable))
        owned = self._owned() if members is None else [own for weight, own in self.each() if weight.name in members]
        sums = squares.sum(owned, self.like.device) * (self.mesh.index("dp") == 0)  # replicas have the same
        self.mesh.world.all_reduce(sums).wait()
        return squares.root(sums)

    def largest(self) -> Tensor:
        """The largest absolute value in this rank's part of all gradients; infinity if one is not finite."""
        return exact.largest(self._owned(), self.like.device)

    def give(self, factor: float, without: set[str], apart: Mapping[str, float]) -> None:
        """Scale them and hand each shard its own; those in ``without`` get none, those ``apart`` have own factors."""
        for bucket in self.buckets:
            row = bucket.owned_row(self.like.dtype)
            if any(weight.name in apart for weight in bucket.trainable):
                for weight in bucket.trainable:
                    bucket.gradient_packing.own(weight, row).mul_(apart.get(weight.name, factor))
            else:
                row.mul_(factor)
            scaled = row.to(bucket.storage.home)
            for weight in bucket.trainable:
                own = None if weight.name in without else bucket.gradient_packing.own(weight, scaled)
                weight.shard.grad = own

    @property
    def _divided(self) -> bool:
        return self.mesh.size("tp", "pp") > 1

    def _owned(self) -> list[Tensor]:
        return [piece for bucket in self.buckets for piece in bucket.owned_pieces()]


def sum_of_squares(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of squares of all elements, in float64: rows of so many are summed in ``dtype``.

    A processor sums a tensor from its beginning to its end: in float32 it loses a hundredth of 1e8 numbers.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    whole = [len(each) - len(each) % ROW for each in flat]
    rows = [
        torch.linalg.vector_norm(each[:end].view(-1, ROW), dim=1, dtype=dtype)
        for each, end in zip(flat, whole, strict=True) if end
    ]  # fmt: skip
    rest = [each[end:] for each, end in zip(flat, whole, strict=True) if end < len(each)]
    return torch.cat([*rows, *([norms(rest, dtype)] if rest else [flat[0].new_zeros(0)])]).double().square().sum()
