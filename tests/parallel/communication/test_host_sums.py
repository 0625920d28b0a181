"""Inside of hosts and between them: right in float64, to the bit where exact, with fewer bytes between hosts."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.flight import BYTES, Flight
from phalanx.launch import pool
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.host_sums import AT_ONCE, in_two_ways, on_hosts
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Messages, Peers
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.torch_private import new_group
from phalanx.torch_errors import About, is_about
from tests.forking import server
from tests.ranks import Ranks

CPU = torch.device("cpu")
SIZES = [1, 5, 6, 7, 64, 1001]
PATIENCE = timedelta(seconds=3)


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


Sent = Counter[bool]
"""Bytes, to ranks of the same host or of another."""


@contextmanager
def on(hosts: Sequence[int]) -> Iterator[tuple[Communicator, Sent]]:
    """All ranks, to whom nothing is small, and what this one sends."""
    group, sent, send = Communicator(dist.group.WORLD, Traffic(), "dp", hosts), Sent(), Peers.send
    group.small_bytes = 0

    def counted(peers: Peers, rows: Messages, number: int) -> list[dist.Work]:
        for rank, place in enumerate(peers._places):
            if rank != peers.rank:
                sent[hosts[place] == hosts[group.rank]] += rows[rank].nbytes
        return send(peers, rows, number)

    with mock.patch.object(Peers, "send", counted):
        yield group, sent
    group._background.close()


def summed(hosts: list[int], exact: bool) -> tuple[list[Tensor], Counter[tuple[str, str]], Sent, int]:
    """Sums of several sizes that are all under way at once; bytes as counted, and sent to this host or to others."""
    with on(hosts) as (group, sent):
        every = [numbers(group.rank, size, exact) for size in SIZES]
        if exact:
            pending = [group.all_reduce_exactly(each, Buffers(CPU)) for each in every]
        else:
            pending = [group.all_reduce(each) for each in every]
        for each in reversed(pending):
            each.wait()
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


def many_at_once(hosts: list[int], size: int) -> tuple[bool, int]:
    """Whether a dozen sums that are launched at once are right, and bytes that were taken for them."""
    with on(hosts) as (group, _):
        if len(hosts) == 2:
            group.connect([])  # as between far hosts
        every = [torch.full((size,), float(place + group.rank)) for place in range(12)]
        for pending in [group.all_reduce(each) for each in every]:
            pending.wait()
        assert group._sums is not None
        kept = group._sums._buffers
        right = [len(hosts) * place + sum(range(len(hosts))) for place in range(12)]
        taken = sum(room.bytes for rooms in kept._free.values() for room in rooms)
    return all(bool((each == want).all()) for each, want in zip(every, right, strict=True)), taken


@pytest.mark.parametrize(("hosts", "each"), [([0, 1], 1.0), ([0, 0, 1, 1], 1.5)])
def test_however_many_are_launched_few_take_memory(ranks: Ranks, hosts: list[int], each: float) -> None:
    """``each``: times what a sum is of."""
    size = 1 << 18
    for right, taken in ranks(len(hosts), many_at_once, hosts, size):
        assert right
        assert 0 < taken <= AT_ONCE * each * 4 * size


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_exact_sums_have_the_bits_of_the_tree(ranks: Ranks, hosts: list[int]) -> None:
    plain = ranks(len(hosts), summed, list(range(len(hosts))), True)
    found = ranks(len(hosts), summed, hosts, True)
    for every, *_ in found:
        assert all(torch.equal(one, other) for one, other in zip(every, plain[0][0], strict=True))
    taken = 4 * sum(size for size in SIZES if size >= len(hosts))
    crossed, straight = sum(sent[False] for *_, sent, _ in found), 2 * (len(hosts) - hosts.count(0)) * taken
    assert 0 < crossed < 1.3 * straight / hosts.count(0), "few of these go straight: those of fewer numbers than ranks"


def gathered(hosts: list[int]) -> tuple[list[Tensor], Sent]:
    """In each of three ways, all under way at once; what was reserved or prepared is launched later, the last first."""
    with on(hosts) as (group, sent):
        parts = [numbers(group.rank, size, True) for size in SIZES]
        every = [part.new_full((group.size, len(part)), torch.nan) for part in parts * 3]
        at_once, later, last = every[: len(SIZES)], every[len(SIZES) : -len(SIZES)], every[-len(SIZES) :]
        reserved = [group.reserved_all_gather(part)[0] for part in parts]
        prepared = [group.prepared_all_gather(each)[0] for each in later]
        pending = [group.all_gather(each, part) for each, part in zip(at_once, parts, strict=True)]
        for place in reversed(range(len(SIZES))):
            later[place][group.rank].copy_(parts[place])
            pending += [prepared[place](), reserved[place](last[place], parts[place])]
        for one in pending:
            one.wait()
    return every, sent


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_a_row_enters_a_host_once(ranks: Ranks, hosts: list[int]) -> None:
    found, many, near = ranks(len(hosts), gathered, hosts), len(hosts), hosts.count(0)
    right = [torch.stack([numbers(rank, size, True) for rank in range(many)]) for size in SIZES] * 3
    for every, _ in found:
        assert all(torch.equal(one, other) for one, other in zip(every, right, strict=True))
    taken = 3 * 4 * sum(SIZES)
    assert sum(sent[False] for _, sent in found) == many * (many // near - 1) * taken, "to other hosts"
    assert {sent.total() for _, sent in found} == {(many - 1) * taken}, "what each sends where all give all"


def scattered(hosts: list[int], dtype: torch.dtype, exactly: bool) -> tuple[list[Tensor], list[Tensor], Sent]:
    """This rank's rows, into memory of its own or where they lie; and what all brought is as it was."""
    with on(hosts) as (group, sent):
        buffers, brought = Buffers(CPU), [brought_by(group.rank, group.size, size).to(dtype) for size in SIZES]
        own = [torch.empty(size, dtype=dtype) for size in SIZES]
        own[-1] = brought[-1][group.rank]
        pending = [
            group.reduce_scatter(each, parts, buffers if place % 2 else None, exactly)
            for place, (each, parts) in enumerate(zip(own, brought, strict=True))
        ]
        for one in reversed(pending):
            one.wait()
    assert not buffers._lent, "all that was taken is given back"
    return own, brought, sent


def brought_by(rank: int, ranks: int, size: int) -> Tensor:
    return torch.randn(ranks, size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=torch.float64)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("exactly", [True, False])
def test_scattered_sums_have_the_bits_of_the_tree(ranks: Ranks, hosts: list[int], exactly: bool) -> None:
    many, near = len(hosts), hosts.count(0)
    plain = ranks(many, scattered, list(range(many)), torch.float32, exactly)
    found = ranks(many, scattered, hosts, torch.float32, exactly)
    for rank, ((own, brought, _), (expected, *_)) in enumerate(zip(found, plain, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))
        before = [brought_by(rank, many, size).float() for size in SIZES]
        before[-1][rank] = own[-1]
        assert all(torch.equal(one, other) for one, other in zip(brought, before, strict=True))
    taken = 4 * sum(SIZES)
    assert sum(sent[False] for *_, sent in found) == many * (many // near - 1) * taken, "to other hosts"
    assert {sent.total() for *_, sent in found} == {(many - 1) * taken}, "what each sends where all give all"


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1, 1, 1], [0, 1, 0, 1]])
def test_sums_go_straight_where_a_host_is_no_node_of_the_tree_and_must_be(ranks: Ranks, hosts: list[int]) -> None:
    many, near = len(hosts), hosts.count(0)
    plain, exact, other = (
        ranks(many, scattered, of, torch.float64, exactly)
        for of, exactly in ((list(range(many)), False), (hosts, True), (hosts, False))
    )
    for (right, *_), (own, _, straight), (close, _, sent) in zip(plain, exact, other, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own, right, strict=True))
        assert all((one - other).norm() <= 1e-12 * other.norm() for one, other in zip(close, right, strict=True))
        assert straight[False] == near * sent[False] > 0


def carried_on() -> bool:
    """Whether a gather and a scatter come to their ends while nobody waits for them, the last hop too."""
    with on([0, 0, 1, 1]) as (group, _):
        every, own = torch.full((4, 9), float(group.rank)), torch.empty(9)
        pending = [group.all_gather(every, every[group.rank]), group.reduce_scatter(own, torch.ones(4, 9))]
        deadline = time.monotonic() + 20
        while not all(one.over for one in pending) and time.monotonic() < deadline:
            time.sleep(0.01)  # as if it computed
        return all(one.over for one in pending) and every[:, 0].tolist() == [0, 1, 2, 3] and bool((own == 4).all())


def test_hops_are_taken_while_a_rank_computes(ranks: Ranks) -> None:
    assert ranks(4, carried_on) == [True] * 4


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


def until_one_dies(kind: str, sends: int) -> tuple[str, str, float]:
    """The last rank dies in the middle of its second collective. What others are told, where, and after how long."""
    memory, rank = bytearray(BYTES), dist.get_rank()
    made = new_group(range(4), rank, f"dies in {kind}", PATIENCE, "fsdp", None)
    group = Communicator(made, Traffic(recorder=FlightRecorder(memoryview(memory), 0, 1, 0)), "fsdp", [0, 0, 1, 1])
    group.small_bytes = 0
    every, left, send = torch.ones(4, 64), [sends], Peers.send

    def dying(peers: Peers, rows: Messages, number: int) -> list[dist.Work]:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return send(peers, rows, number)

    def collective() -> None:
        {
            "all-reduce": lambda: group.all_reduce(every),
            "all-gather": lambda: group.all_gather(every, every[rank]),
            "reduce-scatter": lambda: group.reduce_scatter(torch.empty(64), every),
        }[kind]().wait()

    collective()
    began = time.monotonic()
    with mock.patch.object(Peers, "send", dying if rank == 3 else send):
        try:
            for _ in range(3):
                collective()
        except RuntimeError as error:
            inside = Flight.of(bytes(memory)).inside()
            assert inside is not None
            return str(error), inside.name, time.monotonic() - began
    return "nothing", "", 0.0


@pytest.mark.parametrize(("kind", "sends"), [("all-reduce", 1), ("all-gather", 2), ("reduce-scatter", 2)])
def test_who_waits_for_a_rank_that_died_is_told(kind: str, sends: int) -> None:
    made = pool.Pool(server(), 4, timedelta(seconds=60))
    try:
        with mock.patch.object(pool, "PATIENCE_SECONDS", 30):  # they may answer when the timeout is over
            *others, dead = made.ask(4, until_one_dies, kind, sends)
    finally:
        made.close()
    assert dead.gone
    for answer in others:
        assert not answer.failed, answer.trace
        error, inside, seconds = answer.value
        assert is_about(error, About.GONE, About.WAITED, About.UNREACHED), error
        assert inside.startswith(f"{kind} ")
        assert inside.endswith(" on fsdp")
        assert seconds < 20, "those who wait for one that waits for the dead rank have a timeout of their own"
