"""Gradients of low rank (``comm=powersgd:R``): the matrices of all buckets, summed over replicas in two all-reduces.

While backward goes on, each bucket's matrices are multiplied with what is kept of them; when the last has come, the
products of all, and all that travels as it is, are one message, and what the matrices make of its sum is the second.
Matrices of one shape lie beside each other in both, and are made orthogonal together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.parallel.communication.codecs.low_rank import LowRank, direction, first_basis, matrix, orthogonal
from phalanx.parallel.communication.codecs.owed import Owed
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.weights.coded import CodedGradients
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight


class LowRankGradients(CodedGradients):
    """Of one bucket."""

    def __init__(self, storage: Storage, weights: Sequence[Weight]) -> None:
        super().__init__(storage, weights)
        assert isinstance(self.method, LowRank)
        self.rank, self._first = self.method.rank, {}
        for weight in self.weights:
            columns = matrix(weight.shard.shape)[1]
            self.bases[weight.name] = Owed((columns, self.rank), storage.reduce, storage.device)
            first = first_basis(weight.name, columns, self.rank)
            self._first[weight.name] = first.to(storage.device, storage.reduce)

    def basis(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """What a weight's matrix is multiplied with, and where to put what it will be with next."""
        now, following = self.bases[weight.name].turn()
        first = self._first[weight.name]
        return direction(now.view_as(first), first), following.view_as(first)

    def sent(self, ranks: int) -> Counter[str]:
        numbers = sum(sum(matrix(weight.shard.shape)) * self.rank for weight in self.weights)
        both_ways = 2 * (ranks - 1) / ranks
        return Counter({"all-reduce": round(both_ways * numbers * self.storage.reduce.itemsize)} if self.active else {})


class _Member(NamedTuple):
    """A matrix of a step."""

    value: Tensor
    """Its gradient with what is owed of it; later the sum."""
    left: Tensor
    """Where to put what will be owed."""
    product: Tensor
    """Its part of the first message."""
    following: Tensor
    """Where to put what it is multiplied with next."""


class LowRankSum:
    """Over the replicas, of all buckets."""

    def __init__(self, buckets: Sequence[LowRankGradients]) -> None:
        self.buckets, self.rank = buckets, buckets[0].rank
        self.shapes = {weight.name: matrix(weight.shard.shape) for own in buckets for weight in own.weights}
        self.order = sorted(self.shapes, key=lambda name: self.shapes[name])
        """Weights of one shape are beside each other."""
        self._length = sum(own.packing.length - own.length for own in buckets)
        self._offsets: dict[str, int] = {}
        """Where in the first message a matrix's product is; before all of them is what travels as it is."""
        for name in self.order:
            self._offsets[name] = self._length
            self._length += self.shapes[name][0] * self.rank
        self._message: Tensor | None = None
        self._filled = 0
        self._members: dict[str, _Member] = {}
        self._others: list[tuple[Tensor, Tensor]] = []

    def add(self, own: LowRankGradients, row: Tensor) -> None:
        """A bucket's gradients are there."""
        if self._message is None:
            self._message, self._filled = own.storage.buffers.take(self._length, dtype=row.dtype), 0
        message, others = self._message, row[own.length :]
        self._others.append((message[self._filled : self._filled + len(others)].copy_(others), others))
        self._filled += len(others)
        if own.owed is None:
            return
        before, after = own.owed.turn()
        row[: own.length].add_(before)
        for weight in own.weights:
            (rows, columns), offset = self.shapes[weight.name], self._offsets[weight.name]
            basis, following = own.basis(weight)
            product = message[offset : offset + rows * self.rank].view(rows, self.rank)
            value, left = (own.packing.own(weight, flat).view(rows, columns) for flat in (row, after))
            self._members[weight.name] = _Member(value, left, torch.mm(value, basis, out=product), following)

    def start(self, replicas: Communicator) -> list[Pending]:
        """When the last bucket's are there: sum all, in place."""
        message, others = self._message, self._others
        if message is None:
            return []
        members = [self._members[name] for name in self.order]
        self._message, self._members, self._others = None, {}, []
        first = replicas.all_reduce(message)

        def second() -> Pending:
            first.wait()
            for place, rest in others:
                rest.copy_(place)
            self._orthogonalise(message)
            sizes = [member.following.numel() for member in members]
            told = self.buckets[0].storage.buffers.take(sum(sizes), dtype=message.dtype)
            parts = told.split(sizes)
            for member, part in zip(members, parts, strict=True):
                own = torch.mm(member.value.mT, member.product, out=part.view_as(member.following))
                torch.addmm(member.value, member.product, own.mT, alpha=-1, out=member.left)
            return replicas.all_reduce(told).then(partial(self._finish, message, told, members, parts))

        return [Pending((), second)]

    def _orthogonalise(self, message: Tensor) -> None:
        """The products of all matrices, those of one shape at once."""
        for (rows, _), names in groupby(self.order, key=lambda name: self.shapes[name]):
            alike = list(names)
            first, size = self._offsets[alike[0]], len(alike) * rows * self.rank
            together = message[first : first + size].view(len(alike), rows, self.rank)
            together.copy_(orthogonal(together))

    def _finish(self, message: Tensor, told: Tensor, members: Sequence[_Member], parts: Sequence[Tensor]) -> None:
        for member, part in zip(members, parts, strict=True):
            member.following.copy_(part.view_as(member.following))
            torch.mm(member.product, member.following.mT, out=member.value)
        for taken in (message, told):
            self.buckets[0].storage.buffers.give(taken)


def coded_gradients(storage: Storage, weights: Sequence[Weight]) -> CodedGradients | None:
    """Those of a bucket, as its method sends them; None: as they are."""
    if storage.coding is None:
        return None
    return (LowRankGradients if isinstance(storage.coding.gradients, LowRank) else CodedGradients)(storage, weights)
