"""A communicator: the same result whichever way collectives travel."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks


def world(small: bool = True) -> Communicator:
    made = Communicator(dist.group.WORLD, Traffic())
    made.small_bytes = made.small_bytes if small else 0
    return made


def exchange(small: bool) -> list[torch.Tensor]:
    group = world(small)
    rank, ranks = group.rank, group.size
    own = torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank
    total = own.clone()
    group.all_reduce(total).wait()
    every = own.new_empty(ranks, 2, 3)
    group.all_gather(every, own).wait()
    parts = torch.stack([torch.full((5,), float(rank * 100 + r)) for r in range(ranks)])
    mine = torch.empty(5)
    group.reduce_scatter(mine, parts, Buffers(torch.device("cpu"))).wait()
    narrow = torch.empty(ranks, 3, dtype=torch.bfloat16)
    group.all_gather(narrow, torch.full((3,), float(rank), dtype=torch.bfloat16)).wait()
    return [total, every, mine, narrow]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("ranks_", [2, 3])
def test_sums_and_gathers(ranks: Ranks, ranks_: int, small: bool) -> None:
    answers = ranks(ranks_, exchange, small)
    base = torch.arange(6, dtype=torch.float64).view(2, 3)
    for rank, (total, every, mine, narrow) in enumerate(answers):
        assert torch.equal(total, sum(base + 10 * r for r in range(ranks_)))
        assert torch.equal(every, torch.stack([base + 10 * r for r in range(ranks_)]))
        assert torch.equal(mine, torch.full((5,), float(sum(r * 100 + rank for r in range(ranks_)))))
        assert narrow[:, 0].tolist() == list(range(ranks_))


def summed_exactly(size: int, small: bool) -> tuple[torch.Tensor, int]:
    group = world(small)
    own = torch.randn(8, size, generator=torch.Generator().manual_seed(0))[group.rank].clone()
    pending = group.all_reduce_exactly(own, Buffers(torch.device("cpu")))
    pending.advance()
    assert small or not pending.over
    pending.wait()
    assert pending.over
    return own, group.traffic.sent.total()


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("size", [3, 64, 1001])
def test_exact_sums_are_by_the_tree_with_the_bytes_of_ordinary_ones(ranks: Ranks, size: int, small: bool) -> None:
    rows = torch.randn(8, size, generator=torch.Generator().manual_seed(0))
    pairs = rows[0::2] + rows[1::2]
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    for total, sent in ranks(8, summed_exactly, size, small):
        assert torch.equal(total, expected)
        assert sent == round(size * 4 * 2 * 7 / 8)


def test_alone_everything_is_what_it_was_and_nothing_is_sent() -> None:
    alone = Communicator(None, Traffic(), "tp")
    assert (alone.alone, alone.rank, alone.size, alone.name) == (True, 0, 1, "tp")
    tensor, own, every = torch.ones(2), torch.empty(2), torch.empty(1, 2)
    alone.all_reduce(tensor).wait()
    alone.all_reduce_exactly(tensor, Buffers(torch.device("cpu"))).wait()
    alone.all_reduce_max(tensor)
    alone.broadcast(tensor, 0)
    alone.all_gather(every, tensor).wait()
    alone.reduce_scatter(own, every).wait()
    assert [t.tolist() for t in (tensor, own, *every)] == [[1, 1]] * 3
    assert alone.all_to_all(every) is every
    assert alone.all_to_all_rows(tensor, [2], [2]) is tensor
    assert alone.all_gather_words(["a"]) == [alone.broadcast_words(["a"])]
    assert not alone.traffic.calls


def speak() -> tuple[list[list[str]], list[str]]:
    group = world()
    with mock.patch.object(pickle, "Unpickler", None), mock.patch.object(pickle, "loads", None):
        said = group.all_gather_words(["größer", *(str(number) for number in range(100 * group.rank))])
        assert group.all_gather_words([]) == [[]] * group.size
        return said, group.broadcast_words([f"rank {group.rank}", ""], source=1)


def test_words_travel_whole_and_are_never_unpickled(ranks: Ranks) -> None:
    every = [["größer", *(str(number) for number in range(100 * rank))] for rank in range(3)]
    assert ranks(3, speak) == [(every, ["rank 1", ""])] * 3
