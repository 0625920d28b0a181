"""How weights that travel together lie in one flat buffer, so that one collective moves them all.

    flat  [ranks, length]     row r: rank r's run of the first weight, of the second, ... each padded to equal size

All weights are put there, or taken from there, by one call; where rows divide evenly, in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from phalanx.parallel.communication.memory import Room
from phalanx.parallel.torch_private import copy_each
from phalanx.parallel.weights.weight import Weight

ALIGNED = 512
"""Bytes: where a weight begins in memory that it shares with others, as an allocator of a device would have it."""
_addresses = partial(map, Tensor.data_ptr)


class Packing:
    """Where each of some weights begins in a flat buffer."""

    def __init__(self, weights: Sequence[Weight], block: int = 1) -> None:
        """``block``: every weight begins at a multiple of it, and the row ends at one."""
        self.weights = weights
        self.sizes = [weight.room for weight in weights]
        self.offsets: dict[str, int] = {}
        self.length = 0
        for weight in weights:
            self.offsets[weight.name] = self.length
            self.length += -(-weight.room // block) * block
        self.gaps = self.length != sum(self.sizes)
        """Between weights."""
        self.padded = self.gaps or not all(weight.even for weight in weights)
        self._shards = self._wholes = _Views([])

    def move(self, weights: Sequence[Weight], by: int) -> None:
        """Have the last weights begin later, behind a gap."""
        for weight in weights:
            self.offsets[weight.name] += by
        self.length += by
        self.gaps = self.padded = self.padded or by > 0

    def places(self, flat: Tensor) -> dict[str, Tensor]:
        """Of each weight its part of every row of ``flat``, padding included."""
        if self.gaps:
            return {weight.name: self.place(weight, flat) for weight in self.weights}
        return dict(zip(self.offsets, flat.split(self.sizes, -1), strict=True))

    def place(self, weight: Weight, flat: Tensor) -> Tensor:
        """The same of one weight."""
        offset = self.offsets[weight.name]
        return flat[..., offset : offset + weight.room]

    def own(self, weight: Weight, row: Tensor) -> Tensor:
        """A weight's part of this rank's row, in the shape of its shard."""
        return self.place(weight, row)[: weight.shard.numel()].view(weight.shard.shape)

    def pack(self, row: Tensor) -> None:
        """Put the rows that this rank owns into its row."""
        if not self.length:
            return
        shards = self._flat_shards()
        if self.weights[0].storage.offloaded:  # to be narrowed on the device
            shards = [shard.to(row.device, non_blocking=True) for shard in shards]
        places = list(self.places(row).values())
        if self.padded:
            places = [place[: len(shard)] for place, shard in zip(places, shards, strict=True)]
        copy_each(places, shards)

    def unpack(self, flat: Tensor) -> None:
        """Make weights whole from everybody's rows."""
        if not self.length:
            return
        if self.padded or flat.dtype != self.weights[0].full.dtype:
            places = self.places(flat)
            pairs = [pair for weight in self.weights for pair in weight.pairs(weight.full.data, places[weight.name])]
            copy_each([part for part, _ in pairs], [place for _, place in pairs])
        else:
            torch.split_with_sizes_copy(flat, self.sizes, 1, out=self._by_rank(flat.shape[0]))

    def _flat_shards(self) -> list[Tensor]:
        """Of each weight, the rows that this rank owns."""
        if not self._shards.hold():
            self._shards = _Views([(weight.shard, weight.shard.data.view(-1)) for weight in self.weights])
        return self._shards.views

    def _by_rank(self, ranks: int) -> list[Tensor]:
        """Of each weight all of it, ``[ranks, room]``."""
        if not self._wholes.hold():
            self._wholes = _Views([(each.full, each.full.data.view(ranks, each.room)) for each in self.weights])
        return self._wholes.views


class _Views:
    """Views of parameters, kept from one time to the next."""

    def __init__(self, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._parameters, self.views = [parameter for parameter, _ in made], [view for _, view in made]

    def hold(self) -> bool:
        """Whether nobody has put other memory into a parameter's place."""
        return bool(self.views) and [*_addresses(self._parameters)] == [*_addresses(self.views)]


def one_room(weights: Sequence[Weight]) -> Room:
    """Memory for all of some weights, which is let go and had again for all at once."""
    storage = weights[0].storage
    apart = ALIGNED // storage.compute.itemsize
    first = [0, *accumulate(-(-weight.shape.numel() // apart) * apart for weight in weights)]
    room = Room((first[-1],), storage.compute, storage.device)
    for weight, begin in zip(weights, first[:-1], strict=True):
        weight.move_into(room, begin)
    room.empty()
    return room
