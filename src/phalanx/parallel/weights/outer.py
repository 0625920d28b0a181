"""What sites that train by themselves have agreed on: of each weight the value, and how they come to the next.

Each site has weights of its own, which its steps update. What it has changed of a weight since all agreed on it, a
pseudo-gradient, is averaged over the sites, and is a step of an outer optimizer from the value that was agreed on
(Nesterov's momentum; a rate of 1 without momentum is the mean of the weights). That is done a fragment at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.comm import Comm
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.communication.codecs.chosen import codec_of
from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.weights.weight import Weight

if TYPE_CHECKING:
    from phalanx.parallel.spread import Spread


class OuterWeights:
    """Of the rows that this rank owns. Ranks of other sites that own the same rows hold the same."""

    def __init__(
        self, weights: Sequence[Weight], sizes: Mapping[str, int], local: LocalUpdates, sites: Communicator,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """``sizes``: of all trained weights of the model, in its order. ``dtype``: of what is averaged."""
        self.local, self.sites, self.rate, self.momentum = local, sites, 1.0, 0.0
        self.agreed = {weight.name: weight.shard.data.clone() for weight in weights}
        """The value that all sites have agreed on."""
        self.velocity: dict[str, Tensor] = {}
        """What the outer optimizer carries on, where it has momentum."""
        self.untold: list[float] = []
        """What this site has yet to tell the others of its steps."""
        self.weights = {weight.name: weight for weight in weights}
        method = Comm.parse(local.codec) if local.codec else None
        codec = None if method is None else codec_of(method)
        assert codec is None or isinstance(codec, Codec)
        where = local.divided(sizes)
        parts = [[weight for weight in weights if where[weight.name] == part] for part in range(local.fragments)]
        self.fragments = [Fragment(part, sites, codec, Buffers(device), dtype) for part in parts]

    @classmethod
    def of(cls, spread: Spread, local: LocalUpdates) -> OuterWeights:
        """Of a model that is spread over a site."""
        trained = [weight for weight in spread.weights.values() if weight.trainable and weight.shard.numel()]
        sizes = {name: spread.holding.shapes[name].numel() for name, trained in spread.trainable.items() if trained}
        sites = spread.mesh.everybody.group("dp")
        return cls(trained, sizes, local, sites, spread.dtypes.reduce, spread.device)

    def begin(self, rate: float, momentum: float) -> None:
        """Have this outer optimizer from now on."""
        self.rate, self.momentum = rate, momentum
        for name, value in self.agreed.items() if momentum else ():
            self.velocity.setdefault(name, torch.zeros_like(value))

    def settle(self, name: str) -> None:
        """A weight is what all have agreed on: that of a state which has no other."""
        self.agreed[name].copy_(self.weights[name].shard.data)

    def leave(self, number: int) -> None:
        """A fragment begins to travel."""
        self.fragments[number].leave(self.agreed)

    def advance(self) -> None:
        """Have what is on its way go its second half."""
        for fragment in self.fragments:
            if fragment.pending is not None:
                fragment.pending.advance()

    @torch.no_grad()
    def arrive(self, number: int, kept: float) -> None:
        """A fragment is agreed on: it has come, or now leaves and comes. ``kept``: of a site's own weights."""
        fragment = self.fragments[number]
        if fragment.pending is None:
            self.leave(number)
        for weight, change in fragment.arrive():
            agreed, change = self.agreed[weight.name], change.to(weight.shard.device)
            if self.momentum:
                velocity = self.velocity[weight.name]
                velocity.mul_(self.momentum).add_(change)
                change = change.add(velocity, alpha=self.momentum)
            agreed.sub_(change, alpha=self.rate)
            weight.shard.data.lerp_(agreed, 1 - kept) if kept else weight.shard.data.copy_(agreed)

    def rest(self) -> None:
        """A site goes on with nothing but what all have agreed on."""
        for name, weight in self.weights.items():
            weight.shard.data.copy_(self.agreed[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While this lasts, weights are those that all have agreed on."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self.weights.items():
            own = weight.shard.data.clone()
            weight.shard.data.copy_(self.agreed[name])
            self.agreed[name].copy_(own)


class Fragment:
    """Weights that sites agree on at the same time: one message, in which every weight begins a block of its own."""

    def __init__(
        self, weights: Sequence[Weight], sites: Communicator, codec: Codec | None, buffers: Buffers, dtype: torch.dtype
    ) -> None:
        self.weights, self.sites, self.codec, self.buffers, self.dtype = weights, sites, codec, buffers, dtype
        block, self.length, self.places = codec.block if codec else 1, 0, list[slice]()
        for weight in weights:
            size = weight.shard.numel()
            self.places.append(slice(self.length, self.length + size))
            self.length += -(-size // block) * block
        if codec is not None:
            self.length = -(-self.length // (block * sites.size)) * block * sites.size
        self.pending: Pending | None = None
        """It is on its way."""
        self._flat: Tensor | None = None

    @torch.no_grad()
    def leave(self, agreed: Mapping[str, Tensor]) -> None:
        """Send what this site has changed."""
        flat = self._flat = self.buffers.take(self.length, dtype=self.dtype)
        if self.codec is not None:
            flat.zero_()  # between the weights too
        for weight, place in zip(self.weights, self.places, strict=True):
            flat[place].copy_((agreed[weight.name] - weight.shard.data).view(-1))
        if not self.length:
            self.pending = Pending()
        elif self.codec is not None:
            self.pending = self.codec.all_reduce(self.sites, flat, None, None, self.buffers)
        else:
            self.pending = self.sites.all_reduce(flat)

    def arrive(self) -> Iterator[tuple[Weight, Tensor]]:
        """Wait for it: of each weight the mean over the sites."""
        assert self.pending is not None
        assert self._flat is not None
        self.pending.wait()
        flat, self.pending, self._flat = self._flat.div_(self.sites.size), None, None
        for weight, place in zip(self.weights, self.places, strict=True):
            yield weight, flat[place].view(weight.shard.shape)
        self.buffers.give(flat)
