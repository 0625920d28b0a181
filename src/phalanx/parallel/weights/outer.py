"""What sites that train by themselves have agreed on: of each weight the value, and how they come to the next.

Each site has weights of its own, which its steps update. What it has changed of a weight since all agreed on it, a
pseudo-gradient, is averaged over the sites, and is a step of an outer optimizer from the value that was agreed on
(Nesterov's momentum; a rate of 1 without momentum is the mean of the weights). That is done a fragment at a time. Where
steps are trained while one travels, what a site has changed meanwhile is added to what all have agreed on.
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
        buffers = {each: Buffers(each) for each in {device, *(weight.shard.device for weight in weights)}}
        self.fragments = [Fragment(part, sites, codec, buffers, device, dtype, local.overlap > 0) for part in parts]

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
        """Have codes that are on their way go their second half, where no thread does: for sums nobody waits yet."""
        for fragment in self.fragments:
            if fragment.codec is not None and fragment.pending is not None and fragment.pending.follows:
                fragment.pending.advance()

    @property
    def travelling(self) -> set[int]:
        """Fragments that are on their way."""
        return {number for number, fragment in enumerate(self.fragments) if fragment.pending is not None}

    def arrive(self, number: int) -> None:
        """A fragment is agreed on, by a step of the outer optimizer: it has come, or now leaves and comes."""
        self._agree(number, self.rate, self.momentum)

    def average(self, number: int) -> None:
        """A fragment that is not on its way is agreed on: the mean of what sites have of it."""
        self._agree(number, 1.0, 0.0)

    def discard(self) -> None:
        """Use nothing of what is on its way: weights and what was agreed on are others by now."""
        for number in self.travelling:
            for _ in self.fragments[number].arrive():
                pass

    @torch.no_grad()
    def _agree(self, number: int, rate: float, momentum: float) -> None:
        fragment = self.fragments[number]
        if fragment.pending is None:
            self.leave(number)
        share = 1 / self.sites.size
        for weight, change, departed in fragment.arrive():
            agreed, own, change = self.agreed[weight.name], weight.shard.data, change.to(weight.shard.device)
            agreed.sub_(change, alpha=rate * share)
            if momentum:
                velocity = self.velocity[weight.name].mul_(momentum).add_(change, alpha=share)
                agreed.sub_(velocity, alpha=rate * momentum)
            own.copy_(agreed) if departed is None else own.sub_(departed).add_(agreed)

    def tensors(self) -> list[Tensor]:
        """What is kept beside weights, and what is on its way."""
        travelling = [x for each in self.fragments for x in (each.flat, *each.departed) if x is not None]
        return [*self.agreed.values(), *self.velocity.values(), *travelling]

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
        self, weights: Sequence[Weight], sites: Communicator, codec: Codec | None,
        buffers: Mapping[torch.device, Buffers], device: torch.device, dtype: torch.dtype, late: bool,
    ) -> None:  # fmt: skip
        """``buffers``: of all fragments, by device. ``late``: steps are trained while it travels."""
        self.weights, self.sites, self.codec, self.dtype, self.late = weights, sites, codec, dtype, late
        self.messages, self.buffers = buffers[device], buffers
        block, self.length, self.places, self.gaps = codec.block if codec else 1, 0, list[slice](), list[slice]()
        for weight in weights:
            end = self.length + weight.shard.numel()
            self.places.append(slice(self.length, end))
            self.length = -(-end // block) * block
            self.gaps += [slice(end, self.length)] if end < self.length else []
        if codec is not None:
            end, self.length = self.length, -(-self.length // (block * sites.size)) * block * sites.size
            self.gaps.append(slice(end, self.length))
        self.pending: Pending | None = None
        """It is on its way."""
        self.flat: Tensor | None = None
        """The message."""
        self.departed: list[Tensor | None] = []
        """Weights as they were when it left, where steps are trained while it travels."""

    @torch.no_grad()
    def leave(self, agreed: Mapping[str, Tensor]) -> None:
        """Send what this site has changed."""
        flat = self.flat = self.messages.take(self.length, dtype=self.dtype)
        for gap in self.gaps:
            flat[gap].zero_()  # or a block's scale would be of what lay there
        for weight, place in zip(self.weights, self.places, strict=True):
            was, now, change = agreed[weight.name], weight.shard.data, flat[place].view(weight.shard.shape)
            torch.sub(was, now, out=change) if now.device == flat.device else change.copy_(was - now)
        self.departed = [self._copy(weight.shard.data) if self.late else None for weight in self.weights]
        if not self.length:
            self.pending = Pending()
        elif self.codec is not None:
            self.pending = self.codec.all_reduce(self.sites, flat, None, None, self.messages)
        else:
            self.pending = self.sites.all_reduce(flat)

    def _copy(self, shard: Tensor) -> Tensor:
        return self.buffers[shard.device].take(*shard.shape, dtype=shard.dtype).copy_(shard)

    def arrive(self) -> Iterator[tuple[Weight, Tensor, Tensor | None]]:
        """Wait for it: of each weight the sum over the sites, and what it was here when it left."""
        assert self.pending is not None
        assert self.flat is not None
        self.pending.wait()
        flat, self.pending, self.flat = self.flat, None, None
        for weight, place, departed in zip(self.weights, self.places, self.departed, strict=True):
            yield weight, flat[place].view(weight.shard.shape), departed
            if departed is not None:
                self.buffers[departed.device].give(departed)
        self.messages.give(flat)
        self.departed = []
