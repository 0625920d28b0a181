"""Products that tensor parallelism computes while it sums.

In backward, the gradient of a container's input is summed over ranks while the gradients of its weights are computed.
Autograd runs what was recorded last first, of all that it could run. So before the collective on the way into a
container, whose backward launches the sum, two kinds of nodes are recorded: one that waits for the sum
(`differentiable.awaited`), and after it one for each weight of the container's, in whose backward the product of its
gradient is computed. A linear's own backward gives the gradient of its input alone, and leaves to that node what the
product needs: inputs and output gradients of a container's linears are in memory together until then. The products
are those that there were, in another order, and no thread is needed.

A row-parallel linear whose output is reduce-scattered does some tokens after others: their sum is under way while those
of the next are multiplied, and likewise their gradients, gathered on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from phalanx.layout import Layout
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import padded, run
from phalanx.parallel.communication.narrow import EXACTLY, Narrow
from phalanx.parallel.communication.narrowed import start_all_gather, start_reduce_scatter
from phalanx.parallel.forward.calls import TIME

LEAST_BYTES = 1 << 20
"""Of a container's input, for its sum to be worth the few nodes more in autograd's graph."""
CHUNKS = 4
"""Of a row-parallel linear's tokens, at most."""
CHUNK_BYTES = 1 << 18
"""That a rank sends to each other one of a chunk's, at least."""


def possible(layout: Layout) -> bool:
    """Not in a compiled block, whose order is the compiler's, nor where a schedule leaves these gradients for later."""
    return layout.compile == "none" and not (layout.pp > 1 and layout.schedule == "zb")


class LateWeight:
    """A linear's weight in one call of its container."""

    def __init__(self, weight: Tensor) -> None:
        self.left: dict[int, tuple[Tensor, Tensor]] = {}
        """By call of the linear: its input, and the gradient of its output."""
        self.calls = 0
        self.weight: Tensor = _LateAlias.apply(weight, self.left)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear``, whose weight gets its gradient when nothing that was recorded later is left to do."""
        self.calls += 1
        return _LateLinear.apply(x, self.weight, bias, self.left, self.calls)

    def scattered(self, x: Tensor, group: Communicator, chunks: int, narrow: Narrow = EXACTLY) -> Tensor:
        """A row-parallel linear without its bias: this rank's run of time, summed over ranks."""
        self.calls += 1
        return _ScatteredLinear.apply(x, self.weight, self.left, self.calls, group, chunks, narrow)


def chunks_of(x: Tensor, features: int, group: Communicator) -> int:
    """In how many a row-parallel linear with so many output features does its tokens; the same on all ranks.

    On gloo, where the sums need no processor of the products'. NCCL's take a part of the GPU: there it is one.
    """
    if not group.expects:
        return 1
    each = _each(x, group)
    sent = x.shape[:TIME].numel() * each * features * x.element_size()
    return max(1, min(CHUNKS, each, sent // CHUNK_BYTES))


class _LateAlias(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.left = left
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: None) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        while ctx.left:
            _, (x, by_output) = ctx.left.popitem()
            flat, rows = by_output.reshape(-1, by_output.shape[-1]).T, x.reshape(-1, x.shape[-1])
            total = flat @ rows if total is None else total.addmm_(flat, rows)
        return total, None


class _LateLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: dict[int, tuple[Tensor, Tensor]], call: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left, ctx.call = left, call
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.left[ctx.call] = x, gradient
        by_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, by_bias, None, None


class _ScatteredLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        left: dict[int, tuple[Tensor, Tensor]],
        call: int,
        group: Communicator,
        chunks: int,
        narrow: Narrow,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left, ctx.call, ctx.group, ctx.chunks, ctx.narrow = left, call, group, chunks, narrow
        each, coming = _each(x, group), []
        runs = padded(x, TIME, each * group.size).unflatten(TIME, (group.size, each)).movedim(TIME, 0)
        for part in runs.tensor_split(chunks, 1 + TIME):
            parts = F.linear(part, weight)  # [ranks, batch, time, features]
            coming.append(start_reduce_scatter(parts, group, narrow))
        start, stop = run(x.shape[TIME], group.size, group.rank)
        return torch.cat([finish() for finish in coming], TIME).narrow(TIME, 0, stop - start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        chunks = padded(gradient, TIME, _each(x, ctx.group)).tensor_split(ctx.chunks, TIME)
        coming = [start_all_gather(part.contiguous(), ctx.group, ctx.narrow) for part in chunks]
        by_input, by_output = [], []
        for finish in coming:
            every = finish()
            by_output.append(every)
            if ctx.needs_input_grad[0]:
                by_input.append(every @ weight)
        ctx.left[ctx.call] = x, _in_time(by_output, x.shape[TIME])
        return _in_time(by_input, x.shape[TIME]) if by_input else None, *(None,) * 6


def _each(x: Tensor, group: Communicator) -> int:
    """Positions of every rank's run."""
    return run(x.shape[TIME], group.size, 0)[1]


def _in_time(chunks: list[Tensor], total: int) -> Tensor:
    """Chunks ``[ranks, batch, time, features]`` of all ranks' runs as so many positions."""
    return torch.cat(chunks, 1 + TIME).movedim(0, TIME).flatten(TIME, 1 + TIME).narrow(TIME, 0, total)
