"""Codecs among ranks: sums, scatters and gathers, to the same bits everywhere, in as many bytes as they say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.chosen import Coding
from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.codecs.owed import Owed
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks

CPU, RANKS, SIZE = torch.device("cpu"), 4, 4096
METHODS = pytest.mark.parametrize("comm", ["bf16", "int8", "int4"])


def codec(comm: str) -> Codec:
    coding = Coding.of(Layout(dp=2, comm=comm))
    assert coding is not None
    return coding.gradients


def numbers(rank: int, step: int = 0) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def once(comm: str) -> tuple[Tensor, Tensor, Tensor, dict[tuple[str, str], int]]:
    """An all-reduce, the scatter of a row to each, and a gather of each one's row."""
    traffic, buffers, rank, method = Traffic(), Buffers(CPU), dist.get_rank(), codec(comm)
    group = Communicator(dist.group.WORLD, traffic, "dp")
    x, part, rows = numbers(rank), torch.empty(SIZE // RANKS), torch.empty(RANKS, SIZE)
    method.all_reduce(group, x, None, None, buffers).wait()
    sent = {kind: count for (_, kind), count in traffic.sent.items()}
    method.reduce_scatter(group, part, numbers(rank).view(RANKS, -1), None, buffers).wait()
    method.all_gather(group, rows, numbers(rank), buffers).wait()
    return x, part, rows, sent


@METHODS
def test_ranks_sum_scatter_and_gather(ranks: Ranks, comm: str) -> None:
    found = ranks(RANKS, once, comm)
    right = torch.stack([numbers(rank) for rank in range(RANKS)])
    most = {"bf16": 0.01, "int8": 0.02, "int4": 0.2}[comm]
    for rank, (total, part, rows, sent) in enumerate(found):
        assert torch.equal(total, found[0][0])
        assert torch.equal(rows, found[0][2])
        assert (total - right.sum(0)).norm() < most * right.sum(0).norm()
        assert (rows - right).norm() < most * right.norm()
        own = right.sum(0).view(RANKS, -1)[rank]
        assert (part - own).norm() < most * own.norm()
        each = codec(comm).size(SIZE // RANKS, torch.float32) * (RANKS - 1)
        assert sent == {"all-to-all": each, "all-gather": each}


def test_int4_takes_a_seventh_of_the_bytes() -> None:
    assert 7 * codec("int4").size(SIZE, torch.float32) < 4 * SIZE


def many(comm: str, steps: int, leave_out: int) -> tuple[Tensor, Tensor]:
    """All that came of some steps, and what is owed after them."""
    group, buffers, method = Communicator(dist.group.WORLD, Traffic(), "dp"), Buffers(CPU), codec(comm)
    owed, of_sums = Owed((1, SIZE), torch.float32, CPU), Owed((SIZE // RANKS,), torch.float32, CPU)
    came = torch.zeros(SIZE)
    for step in range(steps):
        x = numbers(dist.get_rank(), step)
        method.all_reduce(group, x, owed, of_sums, buffers).wait()
        for one in (owed, of_sums):
            one.end_step(step != leave_out, 1.0)
        came += x * (step != leave_out)
    rest = owed.now[0].clone()
    rest.view(RANKS, -1)[dist.get_rank()] += of_sums.now
    return came, rest


@pytest.mark.parametrize("comm", ["int4", "topk:1"])
def test_nothing_that_is_owed_is_lost(ranks: Ranks, comm: str) -> None:
    steps, left_out = 6, 3
    found = ranks(RANKS, many, comm, steps, left_out)
    right = sum(numbers(rank, step) for rank in range(RANKS) for step in range(steps) if step != left_out)
    total = found[0][0] + sum(rest for _, rest in found)
    assert torch.allclose(total, right, atol=1e-4)
    assert (found[0][0] - right).norm() > 0.01 * right.norm()  # without it something is
