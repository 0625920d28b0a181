"""Collectives and their gradients, against what one rank would compute, on dims that do not divide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import (
    Behind,
    all_gather,
    all_gather_rows,
    all_reduce,
    all_to_all,
    awaited,
    reduce_scatter,
    replicate,
    run,
    shard,
)
from phalanx.parallel.communication.narrow import Narrow
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


def narrow_moves(kind: str, total: int) -> None:
    """What arrives is rounded, each rank's by itself, and so are gradients on their way back."""
    group, narrow = Communicator(dist.group.WORLD, Traffic()), Narrow(kind)
    rank, ranks, rounded = group.rank, group.size, narrow.rounded
    every, weights = inputs(ranks, total), inputs(ranks, total)[::-1]
    start, stop = run(total, ranks, rank)
    same, own = every[0], slice(start, stop)
    said, parts = sum(rounded(weight) for weight in weights), sum(rounded(x) for x in every)

    x = same[:, own].clone().requires_grad_()
    whole = all_gather(x, 1, total, group, to="replicated", narrow=narrow)
    assert torch.equal(whole, rounded(same))
    (whole * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, said[:, own], rtol=1e-14)
    x = same[:, own].clone().requires_grad_()
    behind = Behind()
    whole = all_gather(awaited(x, behind), 1, total, group, to="replicated", behind=behind, narrow=narrow)
    (whole * weights[rank]).sum().backward()
    assert torch.allclose(x.grad, said[:, own], rtol=1e-14)

    x = every[rank].clone().requires_grad_()
    part = reduce_scatter(x, 1, group, narrow)
    assert torch.allclose(part, parts[:, own], rtol=1e-14)
    (part * weights[0][:, own]).sum().backward()
    assert torch.equal(x.grad, rounded(weights[0]))

    x = every[rank].clone().requires_grad_()
    found = all_reduce(x, group, to="invariant", narrow=narrow)
    assert torch.allclose(found, rounded(parts), rtol=1e-14)
    found.add_(1)  # as a model may
    (found * weights[0]).sum().backward()
    assert torch.equal(x.grad, weights[0])
    for behind in (None, Behind()):
        x = same.clone().requires_grad_()
        entered = x if behind is None else awaited(x, behind)
        (replicate(entered, group, behind, narrow) * weights[rank]).sum().backward()
        assert torch.allclose(x.grad, rounded(said), rtol=1e-14)

    x = torch.stack([x + rank for x in every]).requires_grad_()
    came = all_to_all(x, group, narrow)
    assert torch.equal(came, torch.stack([rounded(every[rank] + source) for source in range(ranks)]))
    (came * torch.stack(weights)).sum().backward()
    assert torch.equal(x.grad, rounded(weights[rank]).expand_as(x))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(("ranks_", "total"), [(2, 7), (4, 2)])
def test_moves_in_fewer_bits(ranks: Ranks, kind: str, ranks_: int, total: int) -> None:
    ranks(ranks_, narrow_moves, kind, total)


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
