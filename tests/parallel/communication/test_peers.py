"""Messages of gloo's ranks to all others at once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication import peers as peers_
from phalanx.parallel.communication.peers import Peers
from tests.ranks import Ranks

RANKS, SIZE, PART = 3, 5, 16


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


HOSTS = [0, 0, 1]
SIZES = [1, 0, 3, PART, 2 * PART - 1, 2 * PART, 3 * PART + 1, 1001]
"""Of messages: none, few, some around those from which on they are cut, and odd ones."""


def message(source: int, to: int, exchange: int) -> Tensor:
    """Of a size and with numbers of its own, not all of them finite."""
    size = SIZES[(source + to + exchange) % len(SIZES)]
    made = torch.randn(size, generator=torch.Generator().manual_seed(100 * source + 10 * to + exchange))
    made[::7] = float("nan") if exchange % 2 else float("inf")
    return made


def over(connections: int) -> tuple[list[list[Tensor]], Counter[tuple[int, int]]]:
    """Exchanges that threads have under way at once; how many messages went to each rank over each connection."""
    assert dist.group.WORLD is not None
    group, used, isend = dist.group.WORLD, Counter[tuple[int, int]](), dist.isend
    further = [dist.new_group(range(RANKS)) for _ in range(connections - 1)]
    peers = Peers(group, HOSTS)
    peers.connect(further)
    others = peers.among([0, 1, 2])  # which has the connections of all

    def counted(part: Tensor, *, group: dist.ProcessGroup, group_dst: int, tag: int) -> dist.Work | None:
        used[group_dst, [dist.group.WORLD, *further].index(group)] += 1
        return isend(part, group=group, group_dst=group_dst, tag=tag)

    def exchanged(exchange: int, number: int) -> list[Tensor]:
        found = [torch.full_like(message(source, peers.rank, exchange), -1) for source in range(RANKS)]
        works = others.ready(found, number)
        works += others.send([message(peers.rank, to, exchange) for to in range(RANKS)], number)
        for work in works:
            work.wait()
        return found

    numbers = [peers.number() for _ in SIZES]
    with (
        mock.patch.object(peers_, "LEAST_PART", 4 * PART),
        mock.patch.object(dist, "isend", counted),
        ThreadPoolExecutor(3) as threads,
    ):
        found = list(threads.map(exchanged, range(len(SIZES)), numbers))
    assert peers.connections == connections
    dist.barrier()
    peers.close()
    return found, used


@pytest.mark.parametrize("connections", [1, 2, 3])
def test_messages_are_the_same_over_any_number_of_connections(ranks: Ranks, connections: int) -> None:
    for rank, (found, used) in enumerate(ranks(RANKS, over, connections)):
        for exchange, rows in enumerate(found):
            for source in (other for other in range(RANKS) if other != rank):
                right = message(source, rank, exchange)
                assert torch.equal(rows[source].view(torch.int32), right.view(torch.int32)), "to the bit"
        for to in (other for other in range(RANKS) if other != rank):
            by_connection = [used[to, number] for number in range(connections)]
            assert by_connection[0] == len(SIZES), "a part of each, or all of it"
            several = [sum(size >= many * PART for size in SIZES) for many in range(2, connections + 1)]
            assert by_connection[1:] == (several if HOSTS[to] != HOSTS[rank] else [0] * (connections - 1))


def cut_short() -> None:
    """One rank ends when others have a part of what it sends, and wait for the rest."""
    assert dist.group.WORLD is not None
    peers = Peers(dist.group.WORLD, range(RANKS))
    peers.connect([dist.new_group(range(RANKS)) for _ in range(2)])
    into, out = torch.zeros(2, RANKS, 4 << 20, dtype=torch.uint8)
    number = peers.number()
    expected = peers.expect(into, number)
    if peers.rank == 1:
        for to in (0, 2):
            dist.send(out[to].tensor_split(3)[0], group_dst=to, tag=number)
        os.kill(os.getpid(), signal.SIGKILL)
    for work in expected.send(out):
        work.wait()


def test_a_rank_that_ends_is_an_error_to_those_who_wait_for_it(ranks: Ranks) -> None:
    first, gone, last = ranks.ask(RANKS, cut_short)
    assert gone.gone
    for answer in (first, last):
        assert not answer.gone, "it waits"
        assert isinstance(answer.error, RuntimeError), answer
