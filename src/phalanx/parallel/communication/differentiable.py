"""Collectives that gradients flow back through. Each is named by what it does forward; backward does the reverse.

A dim of n is cut over a group into runs of ``ceil(n / ranks)``; the last ones may be short or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.parallel.communication import collectives
from phalanx.parallel.communication.collectives import Group


def run(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's run of a dim begins and ends."""
    each = -(-total // ranks)
    return min(rank * each, total), min((rank + 1) * each, total)


def gather(x: Tensor, dim: int, total: int, group: Group | None, *, alike: bool) -> Tensor:
    """Everybody's runs of a dim in one. ``alike``: all ranks do the same with it, so each has the whole gradient."""
    return x if group is None else _Gather.apply(x, dim % x.ndim, total, group, alike)


def scatter(x: Tensor, dim: int, group: Group | None, *, alike: bool) -> Tensor:
    """This rank's run of a dim. ``alike``: all ranks have the same ``x``; otherwise theirs are summed."""
    return x if group is None else _Scatter.apply(x, dim % x.ndim, group, alike)


def add_up(x: Tensor, group: Group | None, *, alike: bool) -> Tensor:
    """The sum over ranks. ``alike``: all ranks do the same with it, so each has the whole gradient."""
    return x if group is None else _AddUp.apply(x, group, alike)


def share(x: Tensor, group: Group | None) -> Tensor:
    """The same ``x`` on all ranks, with which each does something else: their gradients are summed."""
    return x if group is None else _Share.apply(x, group)


def exchange(x: Tensor, group: Group | None) -> Tensor:
    """Row r goes to rank r, and row r of what comes back is from rank r: ``[ranks, ...]``."""
    return x if group is None else _Exchange.apply(x, group)


def exchange_rows(x: Tensor, out: Sequence[int], back: Sequence[int], group: Group | None) -> Tensor:
    """The first ``out[0]`` rows go to rank 0, the next ``out[1]`` to rank 1; ``back[r]`` rows come from rank r."""
    return x if group is None else _ExchangeRows.apply(x, out, back, group)


def gather_rows(x: Tensor, sizes: Sequence[int], group: Group, *, counts: bool) -> Tensor:
    """Everybody's rows in one, ``sizes[r]`` of them rank r's. Each does something else with them: gradients are summed.

    What a rank that does not ``count`` does with them leaves no gradient; it has no rows of its own.
    """
    return _GatherRows.apply(x, sizes, group, counts)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, total: int, group: Group, alike: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.alike = dim, group, alike
        return _gathered(x, dim, total, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pick = _own if ctx.alike else _summed
        return pick(gradient, ctx.dim, ctx.group), None, None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, alike: bool) -> Tensor:
        ctx.dim, ctx.total, ctx.group = dim, x.shape[dim], group
        return (_own if alike else _summed)(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradient, ctx.dim, ctx.total, ctx.group), None, None, None


class _AddUp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, alike: bool) -> Tensor:
        ctx.group, ctx.alike = group, alike
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient if ctx.alike else _sum(gradient, ctx.group), None, None


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(gradient, ctx.group), None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.exchange(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.exchange(gradient, ctx.group), None


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Sequence[int], back: Sequence[int], group: Group) -> Tensor:
        ctx.out, ctx.back, ctx.group = out, back, group
        return collectives.exchange_rows(x, out, back, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.exchange_rows(gradient, ctx.back, ctx.out, ctx.group), None, None, None


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Group, counts: bool) -> Tensor:
        ctx.sizes, ctx.group, ctx.counts, ctx.shape = sizes, group, counts, x.shape
        narrow = x.to(torch.uint8) if x.dtype is torch.bool else x
        part = _padded(narrow[: sizes[group.rank()]], 0, max(sizes)).contiguous()
        every = part.new_empty(len(sizes), *part.shape)
        collectives.all_gather(every, part, group).wait()
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
        collectives.reduce_scatter(summed, parts, group, exactly=True).wait()
        back = gradient.new_zeros(ctx.shape)
        size = sizes[group.rank()]
        back[:size] = summed[:size].to(gradient.dtype)
        return back, None, None, None


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone().contiguous()
    collectives.all_reduce(total, group).wait()
    return total


def _own(x: Tensor, dim: int, group: Group) -> Tensor:
    start, stop = run(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, start, stop - start).clone()


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def _gathered(x: Tensor, dim: int, total: int, group: Group) -> Tensor:
    part = _padded(x, dim, run(total, group.size(), 0)[1]).contiguous()
    every = part.new_empty(group.size(), *part.shape)
    collectives.all_gather(every, part, group).wait()
    whole = every.movedim(0, dim).flatten(dim, dim + 1)
    return _fresh(whole if whole.shape[dim] == total else whole.narrow(dim, 0, total).contiguous(), every)


def _fresh(x: Tensor, source: Tensor) -> Tensor:
    """Not a view, which a model could not change in place."""
    return x.clone() if x.data_ptr() == source.data_ptr() else x


def _summed(x: Tensor, dim: int, group: Group) -> Tensor:
    ranks, total = group.size(), x.shape[dim]
    each = run(total, ranks, 0)[1]
    parts = _padded(x, dim, each * ranks).unflatten(dim, (ranks, each)).movedim(dim, 0).contiguous()
    own = parts.new_empty(parts.shape[1:])
    collectives.reduce_scatter(own, parts, group).wait()
    start, stop = run(total, ranks, group.rank())
    return own if own.shape[dim] == stop - start else own.narrow(dim, 0, stop - start).clone()
