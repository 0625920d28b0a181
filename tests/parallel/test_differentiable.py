"""Collectives and their gradients, against what one rank would compute, on dims that do not divide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.differentiable import add_up, gather, run, scatter, share
from tests.ranks import Ranks


def inputs(ranks: int, total: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, total, 3, generator=source, dtype=torch.float64) for _ in range(ranks)]


def moves(total: int) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    every, weights = inputs(ranks, total), inputs(ranks, total)[::-1]
    start, stop = run(total, ranks, rank)
    same, own = every[0], slice(start, stop)

    x = same[:, own].clone().requires_grad_()
    whole = gather(x, 1, total, group, alike=False)
    assert torch.equal(whole, same)
    (whole * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, sum(weights)[:, own])
    x.grad = None
    (gather(x, -2, total, group, alike=True) * weights[0]).sum().backward()
    assert torch.allclose(x.grad, weights[0][:, own])

    x = every[rank].clone().requires_grad_()
    part = scatter(x, 1, group, alike=False)
    assert torch.allclose(part, sum(every)[:, own])
    (part * weights[0][:, own]).sum().backward()
    assert torch.allclose(x.grad, weights[0])
    x = same.clone().requires_grad_()
    part = scatter(x, 1, group, alike=True)
    assert torch.equal(part, same[:, own])
    (part * weights[0][:, own]).sum().backward()
    assert torch.allclose(x.grad, weights[0])

    x = every[rank].clone().requires_grad_()
    (add_up(x, group, alike=True) * weights[0]).sum().backward()
    assert torch.allclose(x.grad, weights[0])
    x = same.clone().requires_grad_()
    (share(x, group) * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, sum(weights))


@pytest.mark.parametrize(("ranks_", "total"), [(2, 7), (4, 5), (4, 2), (4, 8)])
def test_moves_and_their_gradients(ranks: Ranks, ranks_: int, total: int) -> None:
    ranks(ranks_, moves, total)
