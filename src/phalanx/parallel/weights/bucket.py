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

from phalanx.errors import WrongUse
from phalanx.parallel.communication.differentiable import run
from phalanx.parallel.communication.exact import Partial
from phalanx.parallel.communication.memory import Room
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.torch_private import install, storage_id, version
from phalanx.parallel.weights.storage import Storage


@dataclass(frozen=True)
class Rows:
    """The rows that one of the ranks that share a weight owns."""

    shape: torch.Size
    """Of what they are rows of."""
    first: int
    last: int

    @classmethod
    def of(cls, shape: torch.Size, ranks: int, rank: int) -> Rows:
        return cls(shape, *run(shape[0] if shape else 1, ranks, rank))

    @property
    def size(self) -> torch.Size:
        """The shape of these rows; one number is a row of one."""
        return torch.Size([self.last - self.first, *self.shape[1:]])


class Weight:
    """One weight under its layout-free name: whole to compute with, and the rows of it that this rank owns."""

    def __init__(
        self,
        name: str,
        described: Tensor,
        shape: torch.Size,
        places: Sequence[tuple[nn.Module, str]],
        storage: Storage,
    ) -> None:
        """``shape`` is what this rank computes with: all of it, or a part that ``tp`` has cut."""
        self.name, self.shape, self.places, self.storage = name, shape, places, storage
        self.trainable, self.marks = described.requires_grad, dict(vars(described))
        self.rows = shape[0] if shape else 1
        self.row_size = math.prod(shape[1:])
        self.rows_each = math.ceil(self.rows / storage.ranks)
        own = Rows.of(shape, storage.ranks, storage.rank)
        self.first, self.last = own.first, own.last
        self.room = self.rows_each * self.row_size
        self.even = self.rows == self.rows_each * storage.ranks
        self.whole: Room
        self.full: nn.Parameter
        self.shard: nn.Parameter
        self.in_use: bool
        """An update of the shard is one of the whole: they are the same memory."""
        self.optimized: nn.Parameter
        """What the optimizer has of it: the shard, or a stand-in for all of it (`parallel.weights.matrices`)."""
        self.whole_state = False
        """Its optimizer does not update each element by itself: what it keeps of it may have any shape."""
        self.state_here = True
        """Whether this rank has what the optimizer keeps of it: of the rows it owns, or of all."""

    def make_room(self) -> None:
        """For all of it, for this rank's rows, or for both in one memory where they can be; nothing is there yet."""
        storage = self.storage
        self.whole = Room(self.shape, storage.compute, storage.device)
        self.full = self._parameter(self.whole.tensor)
        one_memory = storage.always_whole and (storage.parameter, storage.home) == (storage.compute, storage.device)
        if not storage.always_whole:
            self.whole.empty()
        self.in_use = one_memory and storage.ranks == 1
        if self.in_use and self.shape:  # one number is a row of one, here as under every layout
            self.shard = self.full
        elif one_memory:
            self.shard = self._parameter(self.own_rows(self.whole.tensor))
        else:
            size = self.last - self.first, *self.shape[1:]
            self.shard = self._parameter(Room(size, storage.parameter, storage.home).tensor)
        self.optimized = self.shard
        self.install(self.full)
        self.apart = storage_id(self.full) != storage_id(self.shard)

    def own_rows(self, whole: Tensor) -> Tensor:
        return whole.reshape(self.rows, *self.shape[1:])[self.first : self.last]

    def _parameter(self, value: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value, requires_grad=self.trainable)
        vars(parameter).update(self.marks)  # what the model's author noted on it
        parameter.logical_name = self.name  # type: ignore[attr-defined]
        return parameter

    def note_version(self) -> None:
        """From here on, what the model's own code writes to it is seen."""
        self._version = version(self.full)

    def check_unwritten(self) -> None:
        """Refuse a model that writes to a frozen weight, where what it wrote will be lost: it is not in the shard."""
        if not self.trainable and self.apart and version(self.full) != self._version:
            raise WrongUse(
                f"the model's forward writes to {self.name}, which is no buffer, and what it writes is lost where "
                "weights are sharded. Keep it with register_buffer."
            )

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
        """A weight's part of this rank's row, in the shape of its shard."""
        return self.room(weight, row)[: weight.shard.numel()].view(weight.shard.shape)


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
        self.as_made = False
        """Gradients stay where and as narrow as backward makes them: nothing is added to them."""
        self._made: dict[str, Tensor] = {}
        self.accumulating = False
        self.partial = Partial(storage.leaves, storage.buffers) if storage.leaves else None
        self.is_whole = storage.always_whole
        self._gathering: tuple[Pending, Tensor] | None = None

    def start_gather(self) -> None:
        """Begin to make the weights whole; costs nothing if they are, or are about to be."""
        storage = self.storage
        if self.is_whole or self._gathering is not None or storage.group.alone:
            return
        flat = storage.buffers.take(storage.ranks, self.packing.length, dtype=storage.compute)
        row = flat[storage.rank]
        for weight in self.weights:
            self.packing.own(weight, row).copy_(weight.shard.data)
        self._gathering = storage.group.all_gather(flat, row), flat

    def assemble(self, packing: Packing, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, by weight, from everybody's rows. All ranks of the group must call it."""
        flat = row.view(1, -1)
        if not self.storage.group.alone:
            flat = row.new_empty(self.storage.ranks, len(row))
            self.storage.group.all_gather(flat, row).wait()
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
            if not self.storage.always_whole:
                weight.whole.open()
            if self._gathering is None:
                weight.full.data.copy_(weight.shard.data.view(weight.shape))
            else:
                for part, place in self.packing.pairs(weight, weight.full.data, self._gathering[1]):
                    part.copy_(place)
        self._end_gathering()
        self.is_whole = True

    def _end_gathering(self) -> None:
        """Nobody needs what was fetched any more."""
        if self._gathering is not None:
            pending, flat = self._gathering
            pending.wait()
            self.storage.buffers.give(flat)
            self._gathering = None

    def release(self) -> None:
        """Give the whole weights' memory back, and drop what was fetched and not used: it would be stale later."""
        self._end_gathering()
        self.is_whole = False
        for weight in self.weights:
            weight.whole.empty()

    def clear(self, as_made: bool) -> None:
        """Forget the last step's gradients."""
        self.filled.clear()
        self._made.clear()
        if as_made != self.as_made:
            self.gradients, self.owned, self.as_made = None, None, as_made
        self.accumulating = False
        if self.partial is not None:
            self.partial.clear()
            for lent in (self.gradients, None if self.storage.whole_gradients else self.owned):
                if lent is not None:
                    self.storage.buffers.give(lent)
            self.gradients = self.owned = None

    def collect(self, weight: Weight) -> None:
        """Take a weight's new gradient into the flat buffer and let the tensor go."""
        gradient = weight.full.grad
        assert gradient is not None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if self.as_made:
            made = self._made.get(weight.name)
            self._made[weight.name] = gradient.contiguous() if made is None else made + gradient
        else:
            self._add(weight, gradient)
        self.filled.add(weight.name)
        weight.full.grad = None

    def _add(self, weight: Weight, gradient: Tensor) -> None:
        for part, place in self.gradient_packing.pairs(weight, gradient, self._own_gradients()):
            if weight.name in self.filled:
                place.add_(part)
            else:
                place.copy_(part)

    def complete(self) -> None:
        """Put zeros where no gradient came. Of whole gradients that are summed exactly, this is the end of a leaf."""
        missing = [weight for weight in self.trainable if weight.name not in self.filled]
        if self.as_made:
            self._made.update({weight.name: torch.zeros_like(weight.full.data) for weight in missing})
            return
        gradients = self._own_gradients()
        for weight in missing:
            self.gradient_packing.room(weight, gradients).zero_()
        if not self.storage.whole_gradients:
            return
        if self.partial is not None:
            self.filled.clear()
            self.gradients = self.partial.add(gradients)
        if self.gradients is not None:
            self.owned = self.gradients[self.storage.rank]

    def gradient_own(self, weight: Weight) -> Tensor:
        """The summed gradient of the rows of a weight that this rank owns."""
        if self.as_made:
            return self._made[weight.name].view(weight.shard.shape)
        assert self.owned is not None
        return self.gradient_packing.own(weight, self.owned)

    def owned_pieces(self) -> list[Tensor]:
        """The summed gradients of the rows this rank owns, in as few tensors as they lie in."""
        return [self.owned] if self.owned is not None else list(self._made.values())

    def owned_row(self, dtype: torch.dtype) -> Tensor:
        """The same in one row; not always a copy."""
        if self.owned is not None:
            return self.owned.to(dtype)
        row = torch.zeros(self.gradient_packing.length, dtype=dtype, device=self.storage.device)
        for weight in self.trainable:
            self.gradient_packing.own(weight, row).copy_(self.gradient_own(weight))
        return row

    def start_scatter(self) -> Pending:
        """Begin to sum the gradients over the ``fsdp`` group, each rank its own rows, and let the other rows go."""
        storage, gradients, target = self.storage, self.gradients, self._target()
        assert gradients is not None
        pending = storage.group.reduce_scatter(target, gradients, storage.buffers, exactly=self.partial is not None)
        self.filled.clear()
        if not storage.whole_gradients:
            self.gradients = None
            self.accumulating = True

        def finish() -> None:
            pending.wait()
            if storage.whole_gradients:
                return
            if self.partial is not None:
                self.owned = self.partial.add(target)
            elif self.owned is not None and self.owned is not target:
                self.owned.add_(target)
                storage.buffers.give(target)
            storage.buffers.give(gradients)

        return Pending((), finish)

    def _target(self) -> Tensor:
        """Where a sum over ranks goes: to stay, or to be added to what there is."""
        storage, length = self.storage, self.gradient_packing.length
        if not storage.whole_gradients and (self.accumulating or self.partial is not None):
            return storage.buffers.take(length, dtype=storage.reduce)
        if self.owned is None:
            self.owned = Room((length,), storage.reduce, storage.device).tensor.zero_()
        return self.owned

    def _own_gradients(self) -> Tensor:
        if self.gradients is None:
            size = self.storage.ranks, self.gradient_packing.length
            if self.storage.whole_gradients and self.partial is None:
                self.gradients = Room(size, self.storage.reduce, self.storage.device).tensor.zero_()
            else:
                self.gradients = self.storage.buffers.take(*size, dtype=self.storage.reduce)
                if self.gradient_packing.padded:
                    self.gradients.zero_()  # between the rows, or a norm would see what lay there
        return self.gradients
