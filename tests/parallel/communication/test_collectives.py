"""Collectives: the same result whichever way they travel."""

from __future__ import annotations

import pickle
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication import collectives
from phalanx.parallel.communication.memory import Buffers
from tests.ranks import Ranks


def check(small: bool) -> list[torch.Tensor]:
    with mock.patch.object(collectives, "SMALL_BYTES", collectives.SMALL_BYTES if small else 0):
        return exchange()


def exchange() -> list[torch.Tensor]:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    own = torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank
    total = own.clone()
    collectives.all_reduce(total, group).wait()
    every = own.new_empty(world, 2, 3)
    collectives.all_gather(every, own, group).wait()
    parts = torch.stack([torch.full((5,), float(rank * 100 + r)) for r in range(world)])
    mine = torch.empty(5)
    collectives.reduce_scatter(mine, parts, group, Buffers(torch.device("cpu"))).wait()
    narrow = torch.empty(world, 3, dtype=torch.bfloat16)
    collectives.all_gather(narrow, torch.full((3,), float(rank), dtype=torch.bfloat16), group).wait()
    return [total, every, mine, narrow]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_sums_and_gathers(ranks: Ranks, world: int, small: bool) -> None:
    answers = ranks(world, check, small)
    base = torch.arange(6, dtype=torch.float64).view(2, 3)
    for rank, (total, every, mine, narrow) in enumerate(answers):
        assert torch.equal(total, sum(base + 10 * r for r in range(world)))
        assert torch.equal(every, torch.stack([base + 10 * r for r in range(world)]))
        assert torch.equal(mine, torch.full((5,), float(sum(r * 100 + rank for r in range(world)))))
        assert narrow[:, 0].tolist() == list(range(world))


def summed_exactly(size: int, small: bool) -> tuple[torch.Tensor, int]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    own = torch.randn(8, size, generator=torch.Generator().manual_seed(0))[rank].clone()
    before = collectives.sent.total()
    with mock.patch.object(collectives, "SMALL_BYTES", collectives.SMALL_BYTES if small else 0):
        pending = collectives.all_reduce_exactly(own, group, Buffers(torch.device("cpu")))
        pending.advance()
        assert small or not pending.over
        pending.wait()
    assert pending.over
    return own, collectives.sent.total() - before


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("size", [3, 64, 1001])
def test_exact_sums_are_by_the_tree_with_the_bytes_of_ordinary_ones(ranks: Ranks, size: int, small: bool) -> None:
    rows = torch.randn(8, size, generator=torch.Generator().manual_seed(0))
    pairs = rows[0::2] + rows[1::2]
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    for total, sent in ranks(8, summed_exactly, size, small):
        assert torch.equal(total, expected)
        assert sent == round(size * 4 * 2 * 7 / 8)


def test_alone_a_sum_is_what_it_was() -> None:
    tensor = torch.ones(2)
    collectives.all_reduce(tensor, None).wait()
    assert tensor.tolist() == [1, 1]


def speak() -> tuple[list[list[str]], list[str]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    with mock.patch.object(pickle, "Unpickler", None), mock.patch.object(pickle, "loads", None):
        said = collectives.everybodys(["größer", *(str(number) for number in range(100 * rank))], group)
        assert collectives.everybodys([], group) == [[]] * group.size()
        return said, collectives.told([f"rank {rank}", ""], group, source=1)


def test_words_travel_whole_and_are_never_unpickled(ranks: Ranks) -> None:
    every = [["größer", *(str(number) for number in range(100 * rank))] for rank in range(3)]
    assert ranks(3, speak) == [(every, ["rank 1", ""])] * 3


def seen_while_waiting() -> tuple[list[int], list[int]]:
    """Rank 1 comes late; meanwhile another thread of rank 0 looks at what a supervisor would see."""
    collectives.signs = [0, 0, 0]
    seen: list[list[int]] = []
    looking = threading.Timer(0.3, lambda: seen.append(list(collectives.signs)))
    looking.start()
    if dist.get_rank() == 1:
        time.sleep(0.6)
    collectives.all_reduce(torch.ones(1), dist.group.WORLD).wait()
    looking.join()
    return seen[0], list(collectives.signs)


def test_a_rank_that_waits_says_so(ranks: Ranks) -> None:
    first, second = ranks(2, seen_while_waiting)
    assert first == ([1, 0, 1], [1, 0, 0])
    assert second == ([0, 0, 0], [1, 0, 0])
