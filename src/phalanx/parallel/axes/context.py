"""Context parallelism: every rank of ``cp`` computes some positions of each sequence.

The model's own forward runs on whole sequences up to its first block, where the stream is sharded; the last block makes
it whole again (`blocks.boundary`), and the loss takes this rank's part of lazy logits. In between a block gets this
rank's positions of all that goes along with the stream, and attention is the one place where positions meet: keys and
values are gathered (``cp_kind=gather``), or heads are exchanged for time (``ulysses``). A rank holds two chunks of a
sequence, one from its front and one from its back, so that causal work is the same for all.

Every rank has the whole loss, and counts for ``1/cp`` of it; gradients of all weights add up over ``cp``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.kernels.documents import are_starts, dense_mask
from phalanx.logits import Logits, Sequence
from phalanx.parallel.axes import batchnorm
from phalanx.parallel.axes.attending import Attend, Attending
from phalanx.parallel.axes.chunks import SequenceChunks
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import all_gather, all_reduce, all_to_all
from phalanx.parallel.communication.narrow import EXACTLY, Narrow
from phalanx.parallel.forward.activations import ActivationLayout
from phalanx.parallel.forward.calls import TIME, about_sizes, stream
from phalanx.parallel.forward.wrapper import Around, Forward, Layer
from phalanx.parallel.randomness.draws import Randomness
from phalanx.trees import leaves, mapped

MIXING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.RNNBase, nn.GroupNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.MultiheadAttention, *batchnorm.KINDS,
)  # fmt: skip
"""Modules that mix positions in a way that is not reached here."""
NO_ATTENTION = "Write attention with torch.nn.functional.scaled_dot_product_attention, or use fsdp or tp instead of cp."


def check_context(model: nn.Module, anatomy: Anatomy, ranks: int) -> None:
    """Refuse a model whose positions cannot be divided."""
    if not anatomy.in_line:
        raise WrongUse(
            f"cp={ranks} needs a model whose blocks follow each other in one list, and none was found in "
            f"{type(model).__name__}. Name them in Task.anatomy, or use fsdp instead of cp."
        )
    for name in anatomy.blocks:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if isinstance(module, MIXING):
                raise WrongUse(
                    f"{inner} is a {type(module).__name__}, which mixes positions where cp={ranks} cannot reach it. "
                    f"{NO_ATTENTION}"
                )


class ContextParallel(Attending):
    """Makes a model's blocks work with their positions."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        group: Communicator,
        kind: str,
        randomness: Randomness,
        narrow: Narrow = EXACTLY,
    ) -> None:
        """``narrow``: how what attention needs of other ranks is made small on its way."""
        self.group, self.kind, self.randomness, self.narrow = group, kind, randomness, narrow
        self.ranks, self.rank = group.size, group.rank
        self.name = ""
        """The block that computes just now."""
        self.inside = False
        """Whether attention that is called now is a block's own."""
        self.reached = False
        """Whether attention of this block was."""
        self._reached: set[str] = set()
        self._wholes: list[tuple[Tensor, Tensor]] = []
        self._known_places: dict[tuple[int, int], Tensor] = {}
        self._known_orders: dict[int, Tensor] = {}
        self.chunks = SequenceChunks(2 * self.ranks, randomness.device)
        check_context(model, anatomy, self.ranks)
        for name in anatomy.blocks:
            self.reach(model.get_submodule(name))
            for module in model.get_submodule(name).modules():
                if hasattr(module, "whole_time"):
                    vars(module).update(whole_time=self._whole_time, own_time=self._own_time)

    def layer(self, name: str, block: nn.Module) -> Layer:
        """What a block needs to work with this rank's positions of the stream."""
        return Around(f"context {self.kind}", self._block, name, seems_to_attend(block))

    def _block(self, forward: Forward, name: str, attends: bool, *args: Any, **kwargs: Any) -> Any:
        """A block on this rank's positions, also of what goes along with the stream."""
        hidden = stream(args, kwargs, name)
        args, kwargs = mapped(partial(self._cut, hidden), (args, kwargs))
        self.name, self.inside, self.reached = name, True, False
        self._order(self.layout.length)
        self.chunks.prepare(self.layout.length, hidden.dtype)
        try:
            output = forward(*args, **kwargs)
        except RuntimeError as error:
            if not about_sizes(error):
                raise
            advice = "Use cp_kind=gather, fsdp or tp." if self.reached else NO_ATTENTION
            raise WrongUse(
                f"{name} cannot work with its positions under cp={self.ranks},cp_kind={self.kind}: its code fixes "
                f"sizes that cp cuts ({str(error).splitlines()[0]}). {advice}"
            ) from error
        finally:
            self.inside = False
            self._wholes.clear()
        if self.reached:
            self._reached.add(name)
        if attends and name not in self._reached:
            raise WrongUse(f"{name} computes attention where cp={self.ranks} cannot reach it. {NO_ATTENTION}")
        return output

    @property
    def layout(self) -> ActivationLayout:
        """Which positions of sequences of which length are here; None, if all are."""
        return self.randomness.activations.stream

    def places(self, time: int, rank: int) -> Tensor:
        """The positions of a sequence that a rank holds."""
        if (time, rank) not in self._known_places:
            self._known_places[time, rank] = self._make_places(time, rank)
        return self._known_places[time, rank]

    def _make_places(self, time: int, rank: int) -> Tensor:
        chunks = [torch.arange(*self.chunks.span(time, i), device=self.randomness.device) for i in self._pair(rank)]
        return torch.cat(chunks)

    def _pair(self, rank: int) -> tuple[int, int]:
        """A rank's two chunks of twice as many as there are ranks."""
        return rank, 2 * self.ranks - 1 - rank

    def _each(self, time: int) -> int:
        """So many positions at most, of a sequence's, has a rank."""
        return 2 * self.chunks.span(time, 0)[1]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's positions."""
        assert self.layout.positions is not None
        return x.index_select(dim, self.layout.positions)

    def _cut(self, hidden: Tensor, x: Tensor) -> Tensor:
        """This rank's positions of what goes along with the stream; in a mask, those of the queries."""
        if are_starts(x):
            return x
        time, batch = self.layout.length, hidden.shape[0]
        dim = x.ndim - 2
        if x.ndim < 2 or (x.ndim == 2 and x.dtype != torch.bool and x.shape in ((batch, time), (1, time))):
            dim = x.ndim - 1
        if x is hidden or x.ndim == 0 or x.shape[dim] != time:
            return x
        cut = self.own(x, dim)
        self._wholes.append((cut, x))
        return cut

    def whole(self, x: Tensor, dim: int, after: Tensor | None = None, narrow: Narrow = EXACTLY) -> Tensor:
        """Everybody's positions, in order. ``after``: what was gathered before."""
        time = self.layout.length
        each = self._each(time)
        dim %= x.ndim
        padded = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, each - x.shape[dim]])
        every = all_gather(padded, dim, each * self.ranks, self.group, to="replicated", after=after, narrow=narrow)
        return every.index_select(dim, self._order(time))

    def _whole_time(self, x: Tensor, after: Tensor | None = None) -> Tensor:
        return x if self.layout.positions is None else self.whole(x, TIME, after)

    def _own_time(self, x: Tensor) -> Tensor:
        return x if self.layout.positions is None else self.own(x, TIME)

    def _order(self, time: int) -> Tensor:
        """Where each position lies in what all ranks hold, each padded to the same length."""
        if time in self._known_orders:
            return self._known_orders[time]
        each = self._each(time)
        order = torch.empty(time, dtype=torch.int64, device=self.randomness.device)
        for rank in range(self.ranks):
            places = self.places(time, rank)
            order[places] = rank * each + torch.arange(len(places), device=order.device)
        self._known_orders[time] = order
        return order

    def attention(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        *, time: int, draws: bool,
    ) -> Any:  # fmt: skip
        """Attention of this rank's positions to all. ``time`` is the dim of it in what ``attend`` gives.

        Where attention ``draws``, as for dropout, it is called once: a call's draws have its number as their key.
        """
        here = self.layout.positions
        if not self.inside or here is None or key.shape[-2] != len(here) or query.shape[-2] != len(here):
            return attend(query, key, value, mask, causal)  # to what is whole on every rank
        self.inside, self.reached = False, True
        try:
            if self.kind == "ulysses":
                return self._exchanged(attend, query, key, value, mask, causal, time)
            if draws and are_starts(mask):
                mask = dense_mask(mask, 0, self.layout.length, self.layout.length, causal).index_select(-2, here)
                causal = False
            if causal and draws:
                every = torch.arange(self.layout.length, device=here.device)
                mask, causal = here.unsqueeze(1) >= every, False
            return self._gathered(attend, query, key, value, mask, causal, time)
        finally:
            self.inside = True

    def _gathered(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, time: int
    ) -> Any:
        if key.shape == value.shape:
            key, value = self.whole(torch.stack([key, value]), -2, narrow=self.narrow).unbind(0)
        else:
            both = self.whole(torch.cat([key, value], -1), -2, narrow=self.narrow)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        if not causal and not are_starts(mask):
            return attend(query, key, value, mask, False)
        if mask is not None and not are_starts(mask):
            raise WrongUse(f"{self.name} gives attention both a mask and is_causal=True. Give one of them.")
        parts, offset = [], 0
        for index in self._pair(self.rank):
            start, stop = self.chunks.span(self.layout.length, index)
            if start == stop:
                continue
            rows = query.narrow(-2, offset, stop - start)
            offset += stop - start
            seen = self.chunks.seen(index, query, value) if mask is None else mask
            far = stop if causal else self.layout.length
            straight = seen is None or (are_starts(seen) and causal)
            parts.append(attend(rows, key[..., :far, :], value[..., :far, :], seen, straight, start))
        if not parts:  # no position is here: nothing comes out, but the keys' gradients must be asked for
            return attend(query, key, value, None, False)
        return _joined(parts, time)

    def _exchanged(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, time: int
    ) -> Any:
        heads, shared = query.shape[-3], key.shape[-3]
        if heads % self.ranks:
            raise WrongUse(
                f"{self.name} has {heads} heads on each rank, which do not divide by cp={self.ranks} as "
                "cp_kind=ulysses needs. Use cp_kind=gather, or a cp that divides them."
            )
        times = next(n for n in range(1, heads + 1) if shared * n % self.ranks == 0 == heads % (shared * n))
        if times > 1:  # so that every rank has whole key-value heads
            key, value = (x.repeat_interleave(times, -3) for x in (key, value))
        if mask is not None:
            mask = next((whole for cut, whole in self._wholes if cut is mask), mask)
            if mask.shape[-2] not in (1, self.layout.length):
                mask = self.whole(mask, -2)
            if mask.ndim > 2 and mask.shape[-3] == heads:
                mask = mask.narrow(-3, self.rank * heads // self.ranks, heads // self.ranks)
        activations = self.randomness.activations
        known = activations.layout.heads
        known = torch.arange(heads, device=query.device) if known is None else known
        by_heads = ActivationLayout(self.layout.length, heads=known.chunk(self.ranks)[self.rank])
        query, key, value = self._heads_for_time(query, key, value)
        with activations.handed(activations.stream, by_heads):
            output = attend(query, key, value, mask, causal)
        if isinstance(output, tuple):
            return (self._time_for_heads(output[0], time), *output[1:])
        return self._time_for_heads(output, time)

    def _heads_for_time(self, *every: Tensor) -> list[Tensor]:
        """``[batch, heads, here, width]`` to ``[batch, heads / cp, time, width]`` of each, all in one exchange."""
        time = self.layout.length
        each = self._each(time)
        rows = [F.pad(x, [0, 0, 0, each - x.shape[-2]]).unflatten(1, (self.ranks, -1)).movedim(1, 0) for x in every]
        width = math.gcd(*(x.shape[-1] for x in rows))
        flat = torch.cat([x.flatten(2).unflatten(2, (-1, width)) for x in rows], 2)
        sizes = [x.shape[2:].numel() for x in rows]
        parts = all_to_all(flat, self.group, self.narrow).flatten(2).split(sizes, 2)
        came = (part.unflatten(2, x.shape[2:]) for part, x in zip(parts, rows, strict=True))
        return [x.movedim(0, 2).flatten(2, 3).index_select(2, self._order(time)) for x in came]

    def _time_for_heads(self, x: Tensor, time_dim: int) -> Tensor:
        """The way back; ``x`` is ``[batch, heads, time, width]`` or has time before heads."""
        here, time = self.layout.positions, self.layout.length
        assert here is not None
        by_heads = x if time_dim == -2 else x.transpose(1, 2)
        each = self._each(time)
        order = self._order(time)
        rows = by_heads.new_zeros(*by_heads.shape[:2], each * self.ranks, by_heads.shape[3]).index_copy(
            2, order, by_heads
        )
        every = all_to_all(rows.unflatten(2, (self.ranks, each)).movedim(2, 0), self.group, self.narrow)
        own = every.movedim(0, 1).flatten(1, 2).narrow(2, 0, len(here))
        return own if time_dim == -2 else own.transpose(1, 2)

    def share_loss(self, output: Any) -> None:
        """Of lazy logits, let the loss compute this rank's positions alone."""
        for logits in leaves(output, Logits):
            if logits.hidden.ndim != 3:
                continue  # folded: every rank computes all of its loss
            places = self.places(logits.hidden.shape[TIME], self.rank)
            logits.sequence = Sequence(
                partial(torch.index_select, dim=TIME, index=places),
                partial(all_reduce, group=self.group, to="replicated"),
            )


def seems_to_attend(block: nn.Module) -> bool:
    """Whether a block seems to contain attention."""
    return any("attention" in type(m).__name__.lower() or "attn" in name for name, m in block.named_modules())


def _joined(parts: list[Any], time: int) -> Any:
    if isinstance(parts[0], tuple):
        return (torch.cat([part[0] for part in parts], time), *parts[0][1:])
    return torch.cat(parts, time)
