"""Gradients of a bucket that travel in few bits: which of them, how they lie, and what is owed of them.

Every weight begins a block of its own, so what a weight's gradient becomes depends on no other weight. Weights whose
gradient other ranks add to as well, over ``tp`` or ``pp``, lie behind the others and travel as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from functools import cached_property, partial

import torch
from torch import Tensor

from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.codecs.owed import Owed
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.peers import Expected
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.weights.momentum import Momentum
from phalanx.parallel.weights.packing import Packing
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Rows, Weight


class CodedGradients:
    """Of one bucket. A row is of a length that its parts, one a replica, fill with blocks."""

    def __init__(self, storage: Storage, weights: Sequence[Weight]) -> None:
        coding = storage.coding
        assert coding is not None
        self.method, self.axis, self.storage = coding.gradients, coding.axis, storage
        block, self.over_shards = self.method.block, self.axis != "dp"
        self.weights = [weight for weight in weights if not weight.divided and self._takes(weight)]
        self.others = [weight for weight in weights if weight not in self.weights]
        """Those that travel as they are."""
        self.packing = Packing([*self.weights, *self.others], block)
        last = Packing(self.weights, block).length
        parts = block * (1 if self.over_shards or not self.method.two_hops else storage.replicas)
        self.length = -(-last // parts) * parts
        """Of the part of a row that is encoded."""
        self.packing.move(self.others, self.length - last)
        self.active = True
        """Whether this step's gradients are encoded: a method may begin with exact steps."""
        self._expected: Expected | None = None
        self.momentum: Momentum | None = None
        """Where they travel as that."""
        ranks = storage.ranks if self.over_shards else 1
        self.owed = self._owed(ranks, self.length)
        """``[ranks, length]``: of this rank's own gradients."""
        again = self.method.two_hops and not self.over_shards
        self.owed_of_sums = self._owed(self.length // storage.replicas) if again else None
        """Of the part of the sums that it encodes for all replicas."""
        self.bases: dict[str, Owed] = {}
        """By weight, what a method of low rank keeps beside."""
        self._taken_up: Tensor | None = None

    def settle(self) -> None:
        """Owe a share of all that was taken up."""
        if self._taken_up is not None:
            assert self.owed is not None
            share = 1 / (self.storage.ranks if self.over_shards else self.storage.replicas)
            self.owed.now.add_(self._taken_up, alpha=share)
        self._taken_up = None
        self.method.settle()

    def taken_up(self) -> Tensor:
        """Room for all that senders of a saved state owed, where they were more or fewer: this rank's rows, or all."""
        if self._taken_up is None:
            assert self.owed is not None
            self._taken_up = torch.zeros_like(self.owed.now)
        return self._taken_up

    def _owed(self, *shape: int) -> Owed | None:
        if not self.method.feedback or not self.length:
            return None
        owed = Owed(shape, self.storage.reduce, self.storage.device)
        return owed.begin() if self.method.owes_from_the_start else owed

    def _takes(self, weight: Weight) -> bool:
        return self.method.takes(torch.Size([weight.rows_each, *weight.shape[1:]]) if weight.shape else weight.shape)

    @cached_property
    def codec(self) -> Codec:
        """The method, for rows of this bucket's."""
        assert isinstance(self.method, Codec)
        return self.method.for_rows(self._counts)

    def _counts(self) -> Tensor:
        """Of each block of a row, how many numbers are this rank's gradients: the rest is padding."""
        block = self.method.block
        found = torch.zeros(self.length // block, dtype=torch.int32)
        for weight in self.weights:
            whole, rest = divmod(weight.shard.numel(), block)
            first = self.packing.offsets[weight.name] // block
            found[first : first + whole] = block
            if rest:
                found[first + whole] = rest
        return found.to(self.storage.device)

    def own(self, row: Tensor) -> list[tuple[Weight, Tensor]]:
        """Of each weight that is encoded, its part of a row."""
        return [(weight, self.packing.own(weight, row)) for weight in self.weights]

    def pieces(self, owed: Tensor) -> Iterator[tuple[Weight, Rows, Tensor]]:
        """Of what is ``owed``, each weight's rows: this rank's own, or those of all that share it."""
        for weight in self.weights:
            for index, row in enumerate(owed):
                rows = Rows.of(weight.shape, self.storage.ranks, index if self.over_shards else self.storage.rank)
                yield weight, rows, self.packing.place(weight, row)[: rows.size.numel()].view(rows.size)

    def runs(self, owed: Tensor, replica: int) -> Iterator[tuple[Weight, int, Tensor]]:
        """Of what a replica owes of sums, each weight's run, and where that begins in its part of the weight, flat."""
        first = replica * len(owed)
        for weight in self.weights:
            begin = self.packing.offsets[weight.name]
            start, stop = max(begin, first), min(begin + weight.shard.numel(), first + len(owed))
            if start < stop:
                yield weight, weight.first * weight.row_size + start - begin, owed[start - first : stop - first]

    def forget(self) -> None:
        """Nothing is owed any more, nor was taken up."""
        self._taken_up = None
        for owed in self.all_owed():
            if owed.begun:
                owed.now.zero_()

    def all_owed(self) -> list[Owed]:
        """What there is of both, and of what is kept beside."""
        return [owed for owed in (self.owed, self.owed_of_sums, *self.bases.values()) if owed is not None]

    def sent(self, ranks: int) -> Counter[str]:
        """By kind, the bytes that a rank sends to replicas of what is encoded."""
        coded = self.active and not self.method.plain and not self.over_shards and self.length
        return Counter(self.codec.sent(self.length, self.storage.reduce, ranks) if coded else {})

    def end_step(self, counts: bool, factor: float, without: Set[str]) -> None:
        """What is owed is so from now on, if the step counts; gradients will be ``factor`` times as large.

        Of weights in ``without``, which the step does not update, it stays what it was.
        """
        for weight in self.weights if without else ():
            if weight.name in without:
                self._keep(weight)
        for owed in self.all_owed():
            owed.end_step(counts, factor)
        self.method.end_step(counts and not without)

    def _keep(self, weight: Weight) -> None:
        if self.owed is not None:
            self.owed.keep(lambda room: [self.packing.place(weight, room)])
        if self.owed_of_sums is not None:
            replica = self.storage.replica
            self.owed_of_sums.keep(lambda room: [run for own, _, run in self.runs(room, replica) if own is weight])
        if weight.name in self.bases:
            self.bases[weight.name].keep(lambda room: [room])

    def expect(self, replicas: Communicator) -> None:
        """Say to the replicas that this rank is ready for what they will send of this bucket, on all alike."""
        if self.active and self.length and self._expected is None:
            self._expected = self.codec.expect(replicas, self.length, self.storage.reduce, self.storage.buffers)

    def all_reduce(self, replicas: Communicator, row: Tensor) -> list[Pending]:
        """Sum a row over the replicas, in place."""
        if not self.active:
            return [replicas.all_reduce(row)]
        found = [replicas.all_reduce(row[self.length :])] if len(row) > self.length else []
        if self.length:
            if self.momentum is not None:
                self.momentum.add(self.own(row), 1 / replicas.size)
            own = row[: self.length]
            expected, self._expected = self._expected, None
            coded = self.codec.all_reduce(replicas, own, self.owed, self.owed_of_sums, self.storage.buffers, expected)
            found.append(coded if self.momentum is None else coded.then(partial(self.momentum.become, self.own(row))))
        return found

    def reduce_scatter(self, group: Communicator, output: Tensor, gradients: Tensor) -> Pending:
        """Sum ``[ranks, length]`` over the ranks that share the weights, each rank its own row."""
        buffers, found = self.storage.buffers, []
        rest, coded = gradients[:, self.length :], gradients[:, : self.length]
        if rest.shape[1]:
            found.append(group.reduce_scatter(output[self.length :], rest.contiguous()))
        if self.length:
            own = output[: self.length]
            found.append(self.codec.reduce_scatter(group, own, coded.contiguous(), self.owed, buffers))

        def finish() -> None:
            for pending in found:
                pending.wait()

        return Pending((), finish)
