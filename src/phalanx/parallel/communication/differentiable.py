"""Collectives that gradients flow back through.

On an axis, what each rank has of a tensor is one of these, and a gradient has a state of its own:

    replicated  the same on all ranks, and each does something else with it: its gradients are partial
    invariant   the same on all ranks, and all do the same with it: its gradients are the same
    sharded     each rank has its run of a dim: a dim of n is cut into runs of ``ceil(n / ranks)``, the last ones short
                or empty
    partial     each rank has a term of a sum

Each function says what it takes and what it gives; backward goes the same way in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.narrow import EXACTLY, Narrow
from phalanx.parallel.communication.narrowed import Finish, start_all_reduce, start_reduce_scatter
from phalanx.parallel.communication.operators import all_gathered, all_reduced, exchanged, reduce_scattered

Same = Literal["replicated", "invariant"]


def run(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's run of a dim begins and ends."""
    each = -(-total // ranks)
    return min(rank * each, total), min((rank + 1) * each, total)


class Behind:
    """The gradient of an input, whose sum over ranks is under way while backward goes on, until it is `awaited`."""

    def __init__(self) -> None:
        self.finish: Callable[[], Tensor] | None = None
        """Waits for the sum; None where none was started."""


def awaited(x: Tensor, behind: Behind) -> Tensor:
    """The same ``x``, in whose backward the sum is waited for that `all_gather` or `replicate` leaves ``behind``.

    Autograd runs what was recorded last first: what is recorded between this and that one is done meanwhile.
    """
    return Awaited.apply(x, behind)


def all_gather(
    x: Tensor,
    dim: int,
    total: int,
    group: Communicator,
    *,
    to: Same,
    after: Tensor | None = None,
    behind: Behind | None = None,
    narrow: Narrow = EXACTLY,
) -> Tensor:
    """Sharded -> replicated or invariant: everybody's runs of a dim in one.

    ``after``: what another collective gave that comes first, where this one does not follow from it. ``behind``: where
    the gradient's sum is left that an ``x`` that is `awaited` waits for. ``narrow``: how runs, and gradients on their
    way back, are made small.
    """
    return x if group.alone else AllGather.apply(x, dim % x.ndim, total, group, to, after, behind, narrow)


def reduce_scatter(x: Tensor, dim: int, group: Communicator, narrow: Narrow = EXACTLY) -> Tensor:
    """Partial -> sharded: this rank's run of a dim of the sum; ``narrow`` as in `all_gather`."""
    return x if group.alone else ReduceScatter.apply(x, dim % x.ndim, group, narrow)


def shard(x: Tensor, dim: int, group: Communicator) -> Tensor:
    """Invariant -> sharded: this rank's run of a dim."""
    return x if group.alone else Shard.apply(x, dim % x.ndim, group)


def all_reduce(x: Tensor, group: Communicator, *, to: Same, narrow: Narrow = EXACTLY) -> Tensor:
    """Partial -> replicated or invariant: the sum over ranks; ``narrow`` as in `all_gather`."""
    return x if group.alone else AllReduce.apply(x, group, to, narrow)


def replicate(x: Tensor, group: Communicator, behind: Behind | None = None, narrow: Narrow = EXACTLY) -> Tensor:
    """Invariant -> replicated: the same ``x``, whose gradients are summed over ranks; others as in `all_gather`."""
    return x if group.alone else Replicate.apply(x, group, behind, narrow)


def all_to_all(x: Tensor, group: Communicator, narrow: Narrow = EXACTLY) -> Tensor:
    """Row r goes to rank r, and row r of what comes back is from rank r: ``[ranks, ...]``; ``narrow`` as above."""
    return x if group.alone else AllToAll.apply(x, group, narrow)


def all_to_all_rows(
    x: Tensor, out: Sequence[int], back: Sequence[int], group: Communicator, narrow: Narrow = EXACTLY
) -> Tensor:
    """The first ``out[0]`` rows go to rank 0, the next ``out[1]`` to rank 1; ``back[r]`` rows come from rank r."""
    return x if group.alone else AllToAllRows.apply(x, out, back, group, narrow)


def all_gather_rows(x: Tensor, sizes: Sequence[int], group: Communicator, *, counts: bool) -> Tensor:
    """Sharded by uneven runs -> replicated: everybody's rows in one, ``sizes[r]`` of them rank r's.

    What a rank that does not ``count`` does with them leaves no gradient; it has no rows of its own.
    """
    return AllGatherRows.apply(x, sizes, group, counts)


class Awaited(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, behind: Behind) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.behind = behind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        finish, ctx.behind.finish = ctx.behind.finish, None
        return gradient if finish is None else finish(), None


class AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        total: int,
        group: Communicator,
        to: Same,
        after: Tensor | None,
        behind: Behind | None,
        narrow: Narrow,
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.to, ctx.behind, ctx.narrow = dim, group, to, behind, narrow
        return _gathered(x, dim, total, group, after, narrow)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 7
        if ctx.to == "invariant":
            return own_run(gradient, ctx.dim, ctx.group), *nothing
        if ctx.behind is None:
            return _summed(gradient, ctx.dim, ctx.group, ctx.narrow), *nothing
        ctx.behind.finish = _start_summed(gradient, ctx.dim, ctx.group, ctx.narrow)
        return None, *nothing


class Shard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Communicator) -> Tensor:
        ctx.dim, ctx.total, ctx.group = dim, x.shape[dim], group
        return own_run(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradient, ctx.dim, ctx.total, ctx.group), None, None


class ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Communicator, narrow: Narrow) -> Tensor:
        ctx.dim, ctx.total, ctx.group, ctx.narrow = dim, x.shape[dim], group, narrow
        return _summed(x, dim, group, narrow)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradient, ctx.dim, ctx.total, ctx.group, None, ctx.narrow), None, None, None


class AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Communicator, to: Same, narrow: Narrow) -> Tensor:
        ctx.group, ctx.to, ctx.narrow = group, to, narrow
        return all_reduced(x, group, narrow)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 3
        return gradient if ctx.to == "invariant" else all_reduced(gradient, ctx.group, ctx.narrow), *nothing


class Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Communicator, behind: Behind | None, narrow: Narrow) -> Tensor:
        ctx.group, ctx.behind, ctx.narrow = group, behind, narrow
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 3
        if ctx.behind is None:
            return all_reduced(gradient, ctx.group, ctx.narrow), *nothing
        ctx.behind.finish = start_all_reduce(gradient, ctx.group, ctx.narrow)
        return None, *nothing


class AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Communicator, narrow: Narrow) -> Tensor:
        ctx.group, ctx.narrow = group, narrow
        return exchanged(x, group, narrow)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(gradient, ctx.group, ctx.narrow), None, None


class AllToAllRows(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Sequence[int], back: Sequence[int], group: Communicator, narrow: Narrow
    ) -> Tensor:
        ctx.out, ctx.back, ctx.group, ctx.narrow = out, back, group, narrow
        return _exchanged(x, out, back, group, narrow)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, ctx.back, ctx.out, ctx.group, ctx.narrow), None, None, None, None


class AllGatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Communicator, counts: bool) -> Tensor:
        ctx.sizes, ctx.group, ctx.counts, ctx.shape = sizes, group, counts, x.shape
        narrow = x.to(torch.uint8) if x.dtype is torch.bool else x
        part = padded(narrow[: sizes[group.rank]], 0, max(sizes)).contiguous()
        every = part.new_empty(len(sizes), *part.shape)
        group.all_gather(every, part).wait()
        return torch.cat([rows[:size] for rows, size in zip(every, sizes, strict=True)]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sizes, group = ctx.sizes, ctx.group
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        parts = wide.new_zeros(len(sizes), max(sizes), *wide.shape[1:])
        if ctx.counts:
            for rows, own in zip(parts, wide.split(sizes), strict=True):
                rows[: len(own)] = own
        summed = torch.empty_like(parts[0])
        group.reduce_scatter(summed, parts, exactly=True).wait()
        back = gradient.new_zeros(ctx.shape)
        size = sizes[group.rank]
        back[:size] = summed[:size].to(gradient.dtype)
        return back, None, None, None


def _exchanged(x: Tensor, out: Sequence[int], back: Sequence[int], group: Communicator, narrow: Narrow) -> Tensor:
    received = group.all_to_all_rows(narrow.encode(x), out, back)
    return narrow.decode(received, (len(received), *x.shape[1:]), x.dtype)


def own_run(x: Tensor, dim: int, group: Communicator) -> Tensor:
    start, stop = run(x.shape[dim], group.size, group.rank)
    return x.narrow(dim, start, stop - start).clone()


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """With zeros after it along a dim, up to a size."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def _gathered(
    x: Tensor, dim: int, total: int, group: Communicator, after: Tensor | None = None, narrow: Narrow = EXACTLY
) -> Tensor:
    part = padded(x, dim, run(total, group.size, 0)[1]).contiguous()
    every = all_gathered(part, group, after, narrow)
    whole = every.movedim(0, dim).flatten(dim, dim + 1)
    return _fresh(whole if whole.shape[dim] == total else whole.narrow(dim, 0, total).contiguous(), every)


def _fresh(x: Tensor, source: Tensor) -> Tensor:
    """Not a view, which a model could not change in place; a compiler sees to that itself."""
    if torch.compiler.is_compiling():
        return x
    return x.clone() if x.data_ptr() == source.data_ptr() else x


def _summed(x: Tensor, dim: int, group: Communicator, narrow: Narrow) -> Tensor:
    return _unpadded(reduce_scattered(_runs(x, dim, group), group, narrow), x.shape[dim], dim, group)


def _start_summed(x: Tensor, dim: int, group: Communicator, narrow: Narrow) -> Finish:
    """The same, launched; what is returned waits for it."""
    total, finish = x.shape[dim], start_reduce_scatter(_runs(x, dim, group), group, narrow)
    return lambda: _unpadded(finish(), total, dim, group)


def _runs(x: Tensor, dim: int, group: Communicator) -> Tensor:
    """``[ranks, ...]``: every rank's run of a dim, all of the same size."""
    each = run(x.shape[dim], group.size, 0)[1]
    return padded(x, dim, each * group.size).unflatten(dim, (group.size, each)).movedim(dim, 0).contiguous()


def _unpadded(own: Tensor, total: int, dim: int, group: Communicator) -> Tensor:
    start, stop = run(total, group.size, group.rank)
    return own if own.shape[dim] == stop - start else own.narrow(dim, 0, stop - start).clone()
