"""Where weights and gradients lie: a weight's rows by rank, and buckets of weights that travel together.

A weight is cut along its first dim into equal runs of rows, one a rank of the ``fsdp`` axis; the last runs may be short
or empty. A bucket packs its weights' runs one after another, so that one collective moves them all:

    flat  [ranks, length]     row r: rank r's run of the first weight, of the second, ... each padded to equal size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.parallel import collectives
from phalanx.parallel.collectives import Group, Pending
from phalanx.parallel.torch_private import install


@dataclass(frozen=True)
class Storage:
    """How the weights of a run are kept on this rank."""

    ranks: int
    """Ranks that share a weight: the ``fsdp`` degree."""
    rank: int
    group: Group | None
    parameter: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    device: torch.device
    home: torch.device
    """Where this rank's rows and their optimizer state live: the device, or the host if they are offloaded."""
    always_whole: bool
    """Whole weights stay in the device's memory between uses (ZeRO 1 and 2), or are gathered for each use (ZeRO 3)."""


class Weight:
    """One weight under its layout-free name: whole to compute with, and the rows of it that this rank owns."""

    def __init__(
        self, name: str, shape: torch.Size, places: Sequence[tuple[nn.Module, str]], trainable: bool, storage: Storage
    ) -> None:
        self.name, self.shape, self.places, self.trainable = name, shape, places, trainable
        self.rows = shape[0] if shape else 1
        self.row_size = math.prod(shape[1:])
        self.rows_each = math.ceil(self.rows / storage.ranks)
        self.first = min(storage.rank * self.rows_each, self.rows)
        self.last = min(self.first + self.rows_each, self.rows)
        self.room = self.rows_each * self.row_size
        self.even = self.rows == self.rows_each * storage.ranks
        self.full: nn.Parameter
        self.piece: nn.Parameter

    def fill(self, value: Tensor, storage: Storage) -> None:
        """Take the initial value: keep it whole, keep this rank's rows, or both in one memory where they can be."""
        same = storage.parameter == storage.compute and storage.home == storage.device
        value = value.to(storage.device, storage.parameter)
        self.full = self._parameter(
            value.to(storage.compute) if storage.always_whole else value.new_empty(self.shape, dtype=storage.compute)
        )
        if same and storage.always_whole and storage.ranks == 1:
            self.piece = self.full
        else:
            source = self.full.data if same and storage.always_whole else value  # one memory, or one of its own
            rows = source.reshape(self.rows, *self.shape[1:])[self.first : self.last]
            if source is value and storage.ranks > 1:
                rows = rows.clone()  # or the rest of the value would stay in memory
            self.piece = self._parameter(rows.to(storage.home))
        if not storage.always_whole:
            self.full.untyped_storage().resize_(0)
        self.install(self.full)

    def _parameter(self, value: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value, requires_grad=self.trainable)
        parameter.logical_name = self.name  # type: ignore[attr-defined]
        return parameter

    def install(self, parameter: nn.Parameter) -> None:
        """Make this the parameter that the model's modules see."""
        for module, attribute in self.places:
            install(module, attribute, parameter)

    def pairs(self, whole: Tensor, flat: Tensor, offset: int) -> list[tuple[Tensor, Tensor]]:
        """Matching views of a whole tensor of this weight and of a flat buffer where it begins at ``offset``."""
        full_ranks = self.rows // self.rows_each if self.rows_each else 0
        matrix = whole.reshape(self.rows, self.row_size)
        split = full_ranks * self.rows_each
        found = [(matrix[:split].reshape(full_ranks, self.room), flat[:full_ranks, offset : offset + self.room])]
        if split < self.rows:  # one rank has a short run, those after it none
            part = matrix[split:].reshape(-1)
            found.append((part, flat[full_ranks, offset : offset + part.numel()]))
        return found


class Packing:
    """Where each of some weights begins in a flat buffer."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        self.offsets: dict[str, int] = {}
        self.length = 0
        for weight in weights:
            self.offsets[weight.name] = self.length
            self.length += weight.room
        self.padded = not all(weight.even for weight in weights)

    def pairs(self, weight: Weight, whole: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        return weight.pairs(whole, flat, self.offsets[weight.name])

    def room(self, weight: Weight, flat: Tensor) -> Tensor:
        """A weight's part of every row of ``flat``, padding included."""
        offset = self.offsets[weight.name]
        return flat[..., offset : offset + weight.room]

    def own(self, weight: Weight, row: Tensor) -> Tensor:
        """A weight's part of this rank's row, in the shape of its piece."""
        return self.room(weight, row)[: weight.piece.numel()].view(weight.piece.shape)


class Bucket:
    """Weights that travel together, with the memory for their gradients."""

    def __init__(self, name: str, weights: Sequence[Weight], storage: Storage) -> None:
        self.name, self.weights, self.storage = name, weights, storage
        self.trainable = [weight for weight in weights if weight.trainable]
        self.packing, self.gradient_packing = Packing(weights), Packing(self.trainable)
        self.gradients: Tensor | None = None
        """``[ranks, length]``: this rank's own gradients, not summed over ranks."""
        self.owned: Tensor | None = None
        """``[length]``: gradients of the rows this rank owns, summed over ranks."""
        self.filled: set[str] = set()
        self.accumulating = False
        self.is_whole = storage.always_whole
        self._gathering: tuple[Pending, Tensor] | None = None

    def start_gather(self) -> None:
        """Begin to make the weights whole; costs nothing if they are, or are about to be."""
        storage = self.storage
        if self.is_whole or self._gathering is not None or storage.group is None:
            return
        row = torch.zeros(self.packing.length, dtype=storage.compute, device=storage.device)
        for weight in self.weights:
            self.packing.own(weight, row).copy_(weight.piece.data)
        self._gathering = self._gather_rows(row)

    def _gather_rows(self, row: Tensor) -> tuple[Pending, Tensor]:
        """Everybody's rows, ``[ranks, length]``."""
        flat = row.new_empty(self.storage.ranks, len(row))
        assert self.storage.group is not None
        return collectives.all_gather(flat, row, self.storage.group), flat

    def assemble(self, packing: Packing, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, by weight, from everybody's rows. All ranks of the group must call it."""
        flat = row.view(1, -1)
        if self.storage.group is not None:
            pending, flat = self._gather_rows(row)
            pending.wait()
        for weight in packing.weights:
            whole = row.new_empty(weight.shape)
            for part, place in packing.pairs(weight, whole, flat):
                part.copy_(place)
            yield weight.name, whole

    def finish_gather(self) -> None:
        """Make the weights whole, now."""
        if self.is_whole:
            return
        self.start_gather()
        if self._gathering is not None:
            self._gathering[0].wait()
        for weight in self.weights:
            memory = weight.full.untyped_storage()
            if not memory.size():
                memory.resize_(weight.full.numel() * weight.full.element_size())
            if self._gathering is None:
                weight.full.data.copy_(weight.piece.data.view(weight.shape))
            else:
                for part, place in self.packing.pairs(weight, weight.full.data, self._gathering[1]):
                    part.copy_(place)
        self._gathering = None
        self.is_whole = True

    def release(self) -> None:
        """Give the whole weights' memory back, and drop what was fetched and not used: it would be stale later."""
        if self._gathering is not None:
            self._gathering[0].wait()
            self._gathering = None
        self.is_whole = False
        for weight in self.weights:
            weight.full.untyped_storage().resize_(0)

    def clear(self) -> None:
        """Forget the last step's gradients."""
        self.filled.clear()
        self.accumulating = False

    def collect(self, weight: Weight) -> None:
        """Take a weight's new gradient into the flat buffer and let the tensor go."""
        gradient = weight.full.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        for part, place in self.gradient_packing.pairs(weight, gradient, self._own_gradients()):
            if weight.name in self.filled:
                place.add_(part)
            else:
                place.copy_(part)
        self.filled.add(weight.name)
        weight.full.grad = None

    def complete(self) -> None:
        """Put zeros where no gradient came."""
        gradients = self._own_gradients()
        for weight in self.trainable:
            if weight.name not in self.filled:
                self.gradient_packing.room(weight, gradients).zero_()
        if self.storage.ranks == 1:
            self.owned = gradients[0]

    def start_scatter(self) -> Pending:
        """Begin to sum the gradients over the ``fsdp`` group, each rank its own rows, and let this rank's own go."""
        assert self.gradients is not None
        assert self.storage.group is not None
        if self.owned is None:
            self.owned = self._buffer(self.gradient_packing.length)
        owned, add = self.owned, self.accumulating
        target = torch.empty_like(owned) if add else owned
        pending = collectives.reduce_scatter(target, self.gradients, self.storage.group)
        self.gradients = None
        self.filled.clear()
        self.accumulating = True

        def finish() -> None:
            pending.wait()
            if add:
                owned.add_(target)

        return Pending(None, finish)

    def _own_gradients(self) -> Tensor:
        if self.gradients is None:
            self.gradients = self._buffer(self.storage.ranks, self.gradient_packing.length)
        return self.gradients

    def _buffer(self, *shape: int) -> Tensor:
        """Memory for gradients; padding between rows must be zero, or a norm would see it."""
        make = torch.zeros if self.gradient_packing.padded else torch.empty
        return make(shape, dtype=self.storage.reduce, device=self.storage.device)
