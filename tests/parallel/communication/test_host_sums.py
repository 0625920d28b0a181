"""Sums inside of hosts first: right in float64, to the bit where exact, with fewer bytes between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx import Layout
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.host_sums import HostSums, in_two_ways, on_hosts
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Messages, Peers
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.weights import bucket
from phalanx.train.overview import Overview
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks

SIZES = [1, 5, 6, 7, 64, 1001]


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ([0, 0, 1, 1], True), ([0, 0, 0, 1, 1, 1], True), ([0, 0, 1], False), ([0, 1], False), ([0, 0], False),
        ([], False), ([3, 3, 5, 5, 7, 7], True),
    ],
)  # fmt: skip
def test_where_there_are_several_ranks_on_each_of_several_hosts(hosts: list[int], found: bool) -> None:
    assert in_two_ways(hosts) == found
    assert sorted(place for ranks in on_hosts(hosts) for place in ranks) == list(range(len(hosts)))


def numbers(rank: int, size: int, exact: bool) -> Tensor:
    dtype = torch.float32 if exact else torch.float64
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=dtype)


def summed(hosts: list[int], exact: bool) -> tuple[list[Tensor], Counter[tuple[str, str]], Counter[bool], int]:
    """Sums of several sizes that are all under way at once; bytes as counted, and sent to this host or to others."""
    group = Communicator(dist.group.WORLD, Traffic(), "dp", hosts)
    group.small_bytes = 0
    sent, send = Counter[bool](), Peers.send

    def counted(peers: Peers, rows: Messages, number: int) -> list[dist.Work]:
        for rank, place in enumerate(peers._places):
            if rank != peers.rank:
                sent[hosts[place] == hosts[group.rank]] += rows[rank].nbytes
        return send(peers, rows, number)

    every = [numbers(group.rank, size, exact) for size in SIZES]
    with mock.patch.object(Peers, "send", counted):
        if exact:
            pending = [group.all_reduce_exactly(each, Buffers(torch.device("cpu"))) for each in every]
        else:
            pending = [group.all_reduce(each) for each in every]
        for each in reversed(pending):
            each.wait()
    group._background.close()
    return every, group.traffic.sent, sent, group.traffic.calls.total()


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
def test_sums_are_right_at_any_size(ranks: Ranks, hosts: list[int]) -> None:
    found = ranks(len(hosts), summed, hosts, False)
    many, near = len(hosts), hosts.count(0)
    for place, size in enumerate(SIZES):
        right = torch.stack([numbers(rank, size, False) for rank in range(many)]).sum(0)
        for every, *_ in found:
            assert torch.equal(every[place], found[0][0][place]), "ranks have different bits"
            assert (every[place] - right).norm() <= 1e-12 * right.norm()
    taken = 8 * sum(size for size in SIZES if size >= many)
    crossed = sum(sent[False] for _, _, sent, _ in found) / (many // near)
    assert crossed == pytest.approx(2 * (1 - near / many) * taken, abs=1), "from a host to others"
    assert sum(sent.total() for _, _, sent, _ in found) == pytest.approx(2 * (many - 1) * taken, abs=1)
    for _, counted, _, calls in found:
        assert counted == {("default_pg", "all-reduce"): sum(round(8 * size * 2 * (many - 1) / many) for size in SIZES)}
        assert calls == len(SIZES), "one in the record for each sum"


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_exact_sums_have_the_bits_of_the_tree(ranks: Ranks, hosts: list[int]) -> None:
    plain = ranks(len(hosts), summed, list(range(len(hosts))), True)
    found = ranks(len(hosts), summed, hosts, True)
    for every, *_ in found:
        assert all(torch.equal(one, other) for one, other in zip(every, plain[0][0], strict=True))
    taken = 4 * sum(size for size in SIZES if size >= len(hosts))
    crossed, straight = sum(sent[False] for *_, sent, _ in found), 2 * (len(hosts) - hosts.count(0)) * taken
    assert 0 < crossed < 1.3 * straight / hosts.count(0), "few of these go straight: those of fewer numbers than ranks"


def on_uneven_hosts() -> tuple[bool, bool]:
    """Whether sums go inside of hosts first, with three ranks on one and one on another, or two on each."""
    made = [Communicator(dist.group.WORLD, Traffic(), "dp", hosts) for hosts in ([0, 0, 0, 1], [0, 0, 1, 1])]
    every = torch.full((2, 3), float(made[0].rank))
    for group, row in zip(made, every, strict=True):
        group.small_bytes = 0
        group.all_reduce(row).wait()
        group._background.close()
    assert (every == 6).all()
    return made[0]._hosts is not None, made[1]._hosts is not None


def test_uneven_hosts_sum_in_one_ring(ranks: Ranks) -> None:
    assert ranks(4, on_uneven_hosts) == [(False, True)] * 4


STEPS = 3


@cache
def one_device() -> Trace:
    return reference(HostileLanguage(steps=STEPS))


def trained(layout: str, hosts: str) -> tuple[Trace, int]:
    """A run with small buckets that all take the long way, and how many did."""
    taken, all_reduce = list[int](), HostSums.all_reduce

    def counted(self: HostSums, tensor: Tensor) -> object:
        taken.append(tensor.numel())
        return all_reduce(self, tensor)

    with (
        mock.patch.dict("os.environ", {"PHALANX_HOSTS": hosts}),
        mock.patch.object(HostSums, "all_reduce", counted),
        mock.patch.object(Communicator, "small_bytes", 64),
        mock.patch.object(bucket, "BUCKET_BYTES", 1000),
    ):
        return spread_run(HostileLanguage(steps=STEPS), Layout.parse(layout)), len(taken)


@pytest.mark.parametrize(
    ("layout", "hosts"), [("dp=4", "2,2"), ("dp=6", "3,3"), ("dp=4,tp=2", "4,4"), ("dp=4,fsdp=2,zero=2", "4,4")]
)
def test_training_is_that_of_one_device(ranks: Ranks, layout: str, hosts: str) -> None:
    for trace, taken in ranks(Layout.parse(layout).world, trained, layout, hosts):
        assert taken > STEPS
        error, where = difference(trace, one_device())
        assert error < TOLERANCE, where


def told(hosts: Sequence[str]) -> list[str]:
    rank = dist.get_rank()
    with (
        mock.patch.dict("os.environ", {"PHALANX_HOSTS": hosts[rank]}),
        phalanx.Engine(HostileLanguage(steps=1), f"dp={len(hosts)}", device="cpu") as engine,
    ):
        for batch in engine.batches():
            engine.step(batch)
        return [note for note in Overview(engine).notes() if "host" in note]


def test_what_keeps_ranks_from_it_is_said(ranks: Ranks) -> None:
    assert ranks(4, told, ["2,2"] * 4) == [[]] * 4
    for notes in ranks(3, told, ["2,1"] * 3):
        assert "dp=3 has 2, 1 ranks on 2 hosts" in notes[0]
    for notes in ranks(4, told, ["2,2", "2,2", "3,1", "3,1"]):
        assert "told in different ways which of them share a host" in notes[0]
