"""A weight of the model on a rank.

It is cut along its first dim into equal runs of rows, one a rank of the ``fsdp`` axis; the last runs may be short or
empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.errors import WrongUse
from phalanx.parallel.communication.differentiable import run
from phalanx.parallel.communication.memory import Room
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
        self.divided = False
        """Whether ranks of ``tp`` or ``pp`` add to its gradient too."""
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
        same = (storage.parameter, storage.home) == (storage.compute, storage.device)
        one_memory = storage.always_whole and same and storage.gathers is None
        if not storage.always_whole:
            self.whole.empty()
        self.in_use = one_memory and storage.ranks == 1
        if self.in_use and self.shape:  # one number is a row of one, here as under every layout
            self.shard = self.full
        elif one_memory:
            self.shard = self._parameter(self.own_rows(self.whole.tensor))
        else:
            size = self.last - self.first, *self.shape[1:]
            self.shard = self._parameter(Room(size, storage.parameter, storage.home, storage.device).tensor)
        self.optimized = self.shard
        self.install(self.full)
        self.apart = storage_id(self.full) != storage_id(self.shard)

    def move_into(self, room: Room, first: int) -> None:
        """Have a part of another room instead of one of its own; nothing is there yet."""
        self.whole = room
        self.full.data = room.tensor[first : first + self.shape.numel()].view(self.shape)

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

    @property
    def written(self) -> bool:
        """Whether the model's own code has written to it, though it is not trained."""
        return not self.trainable and version(self.full) != self._version

    def check_unwritten(self) -> None:
        """Refuse a model that writes to a frozen weight, where what it wrote will be lost: it is not in the shard."""
        if self.apart and self.written:
            raise WrongUse(
                f"the model's forward writes to {self.name}, which is no buffer, and what it writes is lost where "
                "weights are sharded. Keep it with register_buffer."
            )

    def install(self, parameter: nn.Parameter) -> None:
        """Make this the parameter that the model's modules see."""
        for module, attribute in self.places:
            install(module, attribute, parameter)

    def pairs(self, whole: Tensor, place: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Matching views of a whole tensor of this weight and of its place, ``[ranks, room]``, in a flat buffer."""
        if self.even:
            return [(whole.reshape(self.storage.ranks, self.room), place)]
        full_ranks = self.rows // self.rows_each if self.rows_each else 0
        matrix = whole.reshape(self.rows, self.row_size)
        split = full_ranks * self.rows_each
        found = [(matrix[:split].reshape(full_ranks, self.room), place[:full_ranks])]
        if split < self.rows:  # one rank has a short run, those after it none
            part = matrix[split:].reshape(-1)
            found.append((part, place[full_ranks, : part.numel()]))
        return found
