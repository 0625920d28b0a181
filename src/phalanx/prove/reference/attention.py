"""Attention as ranks of ``cp`` compute it where they send ``activations`` in fewer bits, on one device.

What several ranks have a term of is computed for each of them: with gradients of that rank's queries alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.parallel.axes import hugging_face
from phalanx.parallel.axes.attending import Attend, Attending
from phalanx.parallel.forward.calls import TIME, first_tensor
from phalanx.parallel.forward.wrapper import Around, Forward, wrap
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.weights.placement import Placement
from phalanx.prove.reference.rounded import as_sent


class AttentionOfRanks(Attending):
    """Instead of a model's own, in its blocks."""

    def __init__(self, placement: Placement, model: nn.Module, randomness: Randomness) -> None:
        layout = placement.layout
        self.ranks, self.randomness = layout.cp, randomness
        self.rank = 0
        """By which `hugging_face` takes what a model keeps for each head: here are all heads."""
        self.exchanges, self.kind = layout.cp_kind == "ulysses", layout.activations
        self.over = layout.tp if any(one.heads for one in placement.plan.containers.values()) else 1
        """Ranks of ``tp`` that heads are divided between."""
        self.time: int | None = None
        """Positions of the block that computes just now, outside of its attention."""
        for name in placement.anatomy.blocks:
            block = model.get_submodule(name)
            self.reach(block)
            wrap(block, Around("attention of ranks", self._block))
        hugging_face.reach_attention(model, self)
        assert isinstance(randomness.answers, Answers)
        randomness.answers.before[F.scaled_dot_product_attention] = self.sdpa

    def _block(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.time = first_tensor(args, kwargs).shape[TIME]
        try:
            return forward(*args, **kwargs)
        finally:
            self.time = None

    def attention(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        *, time: int, draws: bool,
    ) -> Any:  # fmt: skip
        length = self.time
        if length is None or key.shape[-2] != length or query.shape[-2] != length:
            return attend(query, key, value, mask, causal)
        self.time = None
        if key.shape[-3] < self.over:  # ranks of tp with the same key-value head have its gradients each by itself
            key, value = (x.repeat_interleave(self.over // x.shape[-3], -3) for x in (key, value))
        try:
            if self.exchanges:
                return self._exchanged(attend, query, key, value, mask, causal)
            calls, every = self.randomness.calls, []
            for rank in range(self.ranks):
                with self.randomness.again(calls) if rank else nullcontext():
                    every.append(attend(query, *self._received(key, value), mask, causal))
            return _first(self._by_position(length, time), *every)
        finally:
            self.time = length

    def _received(self, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """By a rank: of it come all gradients of what this gives."""
        if key.shape == value.shape:
            return as_sent(key, self.kind), as_sent(value, self.kind)
        both = as_sent(torch.cat([key, value], -1), self.kind)
        return both.split([key.shape[-1], value.shape[-1]], -1)

    def _by_position(self, length: int, time: int) -> Callable[..., Tensor]:
        """Of what ranks give, each one's own positions: its chunk from the front, and its chunk from the back."""
        chunk = torch.arange(length) // -(-length // (2 * self.ranks))
        rank = torch.minimum(chunk, 2 * self.ranks - 1 - chunk)

        def picked(*every: Tensor) -> Tensor:
            shape = [length if dim == time % every[0].ndim else 1 for dim in range(every[0].ndim)]
            place = rank.to(every[0].device).view(shape)
            own = [one.where(place == number, 0) for number, one in enumerate(every)]
            return torch.stack(own).sum(0)

        return picked

    def _exchanged(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Any:
        heads, shared = query.shape[-3] // self.over, key.shape[-3] // self.over  # a rank of tp's
        fitting = (n for n in range(1, heads + 1) if shared * n % self.ranks == 0 == heads % (shared * n))
        times = next(fitting, 1)  # so often a key-value head is sent
        width = math.gcd(query.shape[-1], key.shape[-1], value.shape[-1])
        came = (
            as_sent(x.unflatten(-1, (-1, width)), self.kind).flatten(-2)
            for x in (query, key.repeat_interleave(times, -3), value.repeat_interleave(times, -3))
        )
        return _first(lambda x: as_sent(x, self.kind), attend(*came, mask, causal))


def _first(join: Callable[..., Tensor], *every: Any) -> Any:
    """What attention gives, or the first of what it gives, made one."""
    if isinstance(every[0], tuple):
        return (join(*(one[0] for one in every)), *every[0][1:])
    return join(*every)
