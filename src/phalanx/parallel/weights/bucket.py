"""Weights that travel together: made whole by one collective, their gradients summed by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.communication import links
from phalanx.parallel.communication.choosing import LEAST_BYTES, bucket_bytes
from phalanx.parallel.communication.exact import Partial
from phalanx.parallel.communication.launched import Launched
from phalanx.parallel.communication.memory import Room
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.weights.low_rank import coded_gradients
from phalanx.parallel.weights.packing import Packing, one_room
from phalanx.parallel.weights.placement import Placement
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight

BUCKET_BYTES = 25 << 20
GLOO_BYTES = 8 << 20
"""Of gradients that travel together over NCCL, and over gloo: there 8 MiB took no longer where a link is as fast as
memory, and 0.85 of the time at 1 Gbit/s, since they leave while more of backward is to come."""
LEFT = "filled", "_made", "gradients", "owned", "_places", "_own", "accumulating", "as_made"
COPIED = "filled", "_made"


class Bucket:
    """Weights that travel together, with the memory for their gradients."""

    def __init__(self, name: str, weights: Sequence[Weight], storage: Storage) -> None:
        self.name, self.weights, self.storage = name, weights, storage
        self.trainable = [weight for weight in weights if weight.trainable]
        self.packing = Packing(weights, storage.gathers.block if storage.gathers else 1)
        self.coded = coded_gradients(storage, self.trainable) if self.trainable else None
        """Where gradients travel in few bits."""
        self.gradient_packing = self.coded.packing if self.coded else Packing(self.trainable)
        self.room = None if storage.always_whole or not weights else one_room(weights)
        """For the whole weights, where it is let go between uses."""
        self.gradients: Tensor | None = None
        """``[ranks, length]``: this rank's own gradients, not summed over ranks."""
        self.owned: Tensor | None = None
        """``[length]``: gradients of the rows this rank owns, summed over ranks."""
        self._places: dict[str, Tensor] | None = None
        """Of ``gradients`` each weight's part, made once for a buffer."""
        self._own: tuple[Tensor | None, dict[str, Tensor]] = None, {}
        """The same of ``owned``."""
        self.filled: set[str] = set()
        self.as_made = False
        """Gradients stay where and as narrow as backward makes them: nothing is added to them."""
        self._made: dict[str, Tensor] = {}
        self.accumulating = False
        self.partial = Partial(storage.leaves, storage.buffers) if storage.leaves else None
        self.is_whole = storage.always_whole
        self._gathering: tuple[Pending, Tensor] | None = None
        self._reserved: Callable[[Tensor, Tensor], Pending] | None = None

    @property
    def is_coming(self) -> bool:
        """Whether the weights have been asked for."""
        return self._gathering is not None

    def reserve_gather(self) -> Launched:
        """Have the next `start_gather` be of this moment, whenever and on whichever thread it is called.

        What is returned is entered while this rank waits for it.
        """
        storage, length = self.storage, self.packing.length
        dtype = storage.compute
        if (codec := storage.gathers) is not None:
            length, dtype = codec.size(length, storage.reduce), torch.uint8
        like = torch.empty(1, dtype=dtype, device=storage.device).expand(length)
        self._reserved, waiting = storage.group.reserved_all_gather(like)
        return waiting

    def start_gather(self) -> None:
        """Begin to make the weights whole; costs nothing if they are, or are about to be."""
        storage = self.storage
        if self.is_whole or self._gathering is not None:
            return
        if storage.group.alone:
            self._gathering = self._fetched() if storage.offloaded else None
            return
        gathers = storage.gathers
        dtype = storage.compute if gathers is None else storage.reduce
        flat = storage.buffers.take(storage.ranks, self.packing.length, dtype=dtype)
        row = flat[storage.rank]
        if gathers is not None and self.packing.padded:
            row.zero_()
        self.packing.pack(row)
        if gathers is not None:
            self._gathering = gathers.all_gather(storage.group, flat, row, storage.buffers, self._reserved), flat
        else:
            self._gathering = (self._reserved or storage.group.all_gather)(flat, row), flat
        self._reserved = None

    def _fetched(self) -> tuple[Pending, Tensor]:
        """Bring the weights from the host, as wide as they are there, while the device computes."""
        storage = self.storage
        flat = storage.buffers.take(1, self.packing.length, dtype=storage.parameter)
        with storage.copying.beside() as arrived:
            for weight, place in zip(self.weights, flat[0].split(self.packing.sizes), strict=True):
                place.copy_(weight.shard.data.view(-1), non_blocking=True)
        return Pending((), arrived), flat

    def assemble(self, packing: Packing, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, by weight in the bucket's order, from everybody's rows. All of the group must call it."""
        flat = row.view(1, -1)
        if not self.storage.group.alone:
            flat = row.new_empty(self.storage.ranks, len(row))
            self.storage.group.all_gather(flat, row).wait()
        places = packing.places(flat)
        for weight in [weight for weight in self.weights if weight.name in places]:
            whole = row.new_empty(weight.shape)
            for part, place in weight.pairs(whole, places[weight.name]):
                part.copy_(place)
            yield weight.name, whole

    def finish_gather(self) -> None:
        """Make the weights whole, now."""
        if self.is_whole:
            return
        self.start_gather()
        if self.room is not None:
            self.room.open()
        if self._gathering is None:
            for weight in self.weights:
                weight.full.data.copy_(weight.shard.data.view(weight.shape))
        else:
            pending, flat = self._gathering
            pending.wait()
            self.packing.unpack(flat)
            self.storage.buffers.give(flat)
            self._gathering = None
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
        if self.room is not None:
            self.room.empty()

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
        if self.gradients is None:
            self._places, self._own = None, (None, {})

    def gradient_state(self) -> dict[str, Any]:
        """What backward has left here: which gradients there are, and where."""
        return {name: copy(getattr(self, name)) if name in COPIED else getattr(self, name) for name in LEFT}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Backward has left the same once more."""
        vars(self).update({name: copy(state[name]) if name in COPIED else state[name] for name in LEFT})

    def collect(self, weight: Weight, gradient: Tensor) -> None:
        """Take a weight's new gradient into the flat buffer."""
        name, filled = weight.name, self.filled
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.as_made:
            made = self._made.get(name)
            self._made[name] = gradient.contiguous() if made is None else made + gradient
        else:
            places = self._places or self._placed()
            for part, place in weight.pairs(gradient, places[name]):
                if name in filled:
                    place.add_(part)
                else:
                    place.copy_(part)
        filled.add(name)

    def _placed(self) -> dict[str, Tensor]:
        self._places = self.gradient_packing.places(self._own_gradients())
        return self._places

    def complete(self) -> None:
        """Put zeros where no gradient came. Of whole gradients that are summed exactly, this is the end of a leaf."""
        some = len(self.filled) < len(self.trainable)
        missing = [weight for weight in self.trainable if weight.name not in self.filled] if some else []
        if self.as_made:
            self._made.update({weight.name: torch.zeros_like(weight.full.data) for weight in missing})
            return
        gradients = self._own_gradients()
        for weight in missing:
            self.gradient_packing.place(weight, gradients).zero_()
        if not self.storage.whole_gradients:
            return
        if self.partial is not None:
            self.filled.clear()
            self.gradients, self._places = self.partial.add(gradients), None
        if self.gradients is not None and (self.owned is None or self.partial is not None):
            self.owned = self.gradients[self.storage.rank]

    def gradient_own(self, weight: Weight) -> Tensor:
        """The summed gradient of the rows of a weight that this rank owns."""
        if self.as_made:
            return self._made[weight.name].view(weight.shard.shape)
        assert self.owned is not None
        if self._own[0] is not self.owned:
            self._own = self.owned, {each.name: self.gradient_packing.own(each, self.owned) for each in self.trainable}
        return self._own[1][weight.name]

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
        if self.coded is not None and self.coded.over_shards:
            pending = self.coded.reduce_scatter(storage.group, target, gradients)
        else:
            pending = storage.group.reduce_scatter(target, gradients, storage.buffers, exactly=self.partial is not None)
        self.filled.clear()
        if not storage.whole_gradients:
            self.gradients = self._places = None
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

    def end_step(self, counts: bool, factor: float, without: Set[str]) -> None:
        """See `coded.CodedGradients.end_step`."""
        if self.coded is not None:
            self.coded.end_step(counts, factor, without)
            if not counts and self.gradients is not None:
                self.gradients.zero_()  # what is not finite is so in all of a block, between weights too

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


def together(placement: Placement, mesh: Mesh, device: torch.device) -> int:
    """Bytes of gradients that travel together: in few bits over gloo, by what the link is measured to do."""
    replicas, few = mesh.group("dp"), sum(one.shape.numel() for one in placement.weights.values()) <= LEAST_BYTES // 4
    if few or placement.layout.coded_axis != "dp" or not replicas.expects:
        return min(BUCKET_BYTES, GLOO_BYTES) if mesh.world.expects else BUCKET_BYTES
    speed = links.along(replicas, device)
    slowest = torch.tensor([speed.latency, 1 / speed.rate], dtype=torch.float64, device=device)
    mesh.world.all_reduce_max(slowest)
    latency, slowness = slowest.tolist()
    return bucket_bytes(latency, 1 / slowness, BUCKET_BYTES)


def by_size(weights: Sequence[Weight], limit: int) -> list[list[Weight]]:
    """Weights in the order in which backward reaches them, in runs of about so many bytes."""
    runs: list[list[Weight]] = [[]]
    size = 0
    for weight in reversed(weights):
        if size >= limit:
            runs.append([])
            size = 0
        runs[-1].append(weight)
        size += weight.full.numel() * weight.full.element_size()
    return runs
