"""Collectives and their gradients, against what one rank would compute, on dims that do not divide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import (
    all_gather,
    all_gather_rows,
    all_reduce,
    reduce_scatter,
    replicate,
    run,
    shard,
)
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks


def inputs(ranks: int, total: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, total, 3, generator=source, dtype=torch.float64) for _ in range(ranks)]


def moves(total: int) -> None:
    group = Communicator(dist.group.WORLD, Traffic())
    rank, ranks = group.rank, group.size
    every, weights = inputs(ranks, total), inputs(ranks, total)[::-1]
    start, stop = run(total, ranks, rank)
    same, own = every[0], slice(start, stop)

    x = same[:, own].clone().requires_grad_()
    whole = all_gather(x, 1, total, group, to="replicated")
    assert torch.equal(whole, same)
    (whole * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, sum(weights)[:, own])
    x.grad = None
    (all_gather(x, -2, total, group, to="invariant") * weights[0]).sum().backward()
    assert torch.allclose(x.grad, weights[0][:, own])

    x = every[rank].clone().requires_grad_()
    part = reduce_scatter(x, 1, group)
    assert torch.allclose(part, sum(every)[:, own])
    (part * weights[0][:, own]).sum().backward()
    assert torch.allclose(x.grad, weights[0])
    x = same.clone().requires_grad_()
    part = shard(x, 1, group)
    assert torch.equal(part, same[:, own])
    (part * weights[0][:, own]).sum().backward()
    assert torch.allclose(x.grad, weights[0])

    x = every[rank].clone().requires_grad_()
    (all_reduce(x, group, to="invariant") * weights[0]).sum().backward()
    assert torch.allclose(x.grad, weights[0])
    x = same.clone().requires_grad_()
    (replicate(x, group) * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, sum(weights))


@pytest.mark.parametrize(("ranks_", "total"), [(2, 7), (4, 5), (4, 2), (4, 8)])
def test_moves_and_their_gradients(ranks: Ranks, ranks_: int, total: int) -> None:
    ranks(ranks_, moves, total)


def rows(sizes: list[int]) -> None:
    """Whoever has no rows brings one that stands in."""
    group = Communicator(dist.group.WORLD, Traffic())
    rank = group.rank
    whole, *weights = (t[0] for t in inputs(len(sizes) + 1, sum(sizes)))
    start = sum(sizes[:rank])
    own = whole[start : start + sizes[rank]] if sizes[rank] else torch.full((1, 3), 7.0, dtype=whole.dtype)
    x = own.clone().requires_grad_()
    every = all_gather_rows(x, sizes, group, counts=bool(sizes[rank]))
    assert torch.equal(every, whole)
    (every * (weights[rank] if sizes[rank] else float("nan"))).sum().backward()
    total = sum(weight for weight, size in zip(weights, sizes, strict=True) if size)
    wanted = total[start : start + sizes[rank]] if sizes[rank] else torch.zeros(1, 3, dtype=whole.dtype)
    assert torch.allclose(x.grad, wanted)


@pytest.mark.parametrize("sizes", [[3, 4], [0, 1], [2, 0, 3, 2], [0, 1, 0, 1]])
def test_rows_of_everybody(ranks: Ranks, sizes: list[int]) -> None:
    ranks(len(sizes), rows, sizes)
