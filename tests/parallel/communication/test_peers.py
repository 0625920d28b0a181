"""Messages of gloo's ranks to all others at once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication.peers import Peers
from tests.ranks import Ranks

RANKS, SIZE = 3, 5


def two_exchanges(order: int) -> list[Tensor]:
    """Two that are under way at once; ranks send the second first, or last."""
    assert dist.group.WORLD is not None
    peers = Peers(dist.group.WORLD)
    numbers = [peers.number(), peers.number()]
    rows = [torch.arange(RANKS * SIZE).view(RANKS, SIZE) + 100 * peers.rank + 1000 * which for which in range(2)]
    found = [torch.full((RANKS, SIZE), -1) for _ in range(2)]
    works = [work for number, into in zip(numbers, found, strict=True) for work in peers.ready(into, number)]
    for which in (0, 1) if (peers.rank + order) % 2 else (1, 0):
        works += peers.send(rows[which], numbers[which])
    for work in works:
        work.wait()
    return found


def test_rows_come_from_each_rank_whatever_is_sent_first(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(RANKS, two_exchanges, 0)):
        for which, rows in enumerate(found):
            for source in range(RANKS):
                right = torch.arange(SIZE) + SIZE * rank + 100 * source + 1000 * which
                assert torch.equal(rows[source], right if source != rank else torch.full((SIZE,), -1))


def expected_rows() -> tuple[Tensor, list[bool]]:
    """What was expected before anybody had it, sent by threads and ranks in any order."""
    assert dist.group.WORLD is not None
    peers = Peers(dist.group.WORLD)
    found = torch.full((RANKS, SIZE), -1)
    expected = peers.expect(found)
    other = peers.expect(torch.full((RANKS, SIZE), -1))
    rows = torch.arange(RANKS * SIZE).view(RANKS, SIZE) + 100 * peers.rank
    for work in [*other.send(rows + 1000), *expected.send(rows)]:
        work.wait()
    return found, [bool((other.rows[rank] >= 1000).all()) for rank in range(RANKS) if rank != peers.rank]


def test_what_is_expected_comes_to_its_own_place(ranks: Ranks) -> None:
    for rank, (found, others) in enumerate(ranks(RANKS, expected_rows)):
        assert all(others)
        for source in range(RANKS):
            right = torch.arange(SIZE) + SIZE * rank + 100 * source
            assert torch.equal(found[source], right if source != rank else torch.full((SIZE,), -1))
