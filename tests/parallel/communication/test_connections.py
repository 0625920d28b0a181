"""Several connections, where hosts are far: how many, on all ranks alike, and to the same weights."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from benchmarks.slow_network import INTERFACE, PORT, SlowNetwork
from torch import Tensor

import phalanx
from phalanx import Layout
from phalanx.launch.environment import Environment
from phalanx.parallel.communication import connections, links, peers
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.peers import Peers
from phalanx.parallel.weights import bucket
from phalanx.train.overview import Overview
from tests.hosts import needs_namespaces
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks

PATIENCE = timedelta(seconds=30)


@pytest.mark.parametrize(
    ("hosts", "every", "found"),
    [
        ([0, 1], [0, 1], 4), ([0, 1, 2], [0, 1, 2], 2), ([0, 1, 2, 3], [0, 1, 2, 3], 1), ([0, 0], [0, 0], 1),
        ([0, 0, 1, 1], [0, 0, 1, 1], 2), ([0, 1], [0, 0, 1, 1], 2), ([0, 0], [0, 0, 1, 1], 1), ([], [], 1),
        ([0, 1], [0, 1, 2, 3, 4, 5], 4), ([0, 1], [0] * 8 + [1] * 8, 1), ([0] + [1] * 64, [0] + [1] * 64, 1),
    ],
)  # fmt: skip
def test_few_connections_share_a_link(hosts: list[int], every: list[int], found: int) -> None:
    assert connections.at_most(hosts, every) == found


def along(layout: str, hosts: list[int], far: float) -> tuple[dict[str, int], int, float, int]:
    """Of a mesh: connections by axis, the most, its round trip, and how many groups there are in it."""
    with mock.patch.object(connections, "FAR", far):
        mesh = Mesh(Layout.parse(layout), dist.get_rank(), PATIENCE, hosts=hosts)
        mesh.joint("fsdp", "cp", "tp")
    every = {group.name: group._peers.connections for group in mesh._made.values() if group._peers is not None}
    found = every, mesh.connections, mesh.round_trip, len(dist.distributed_c10d._world.pg_map)
    dist.barrier()
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("layout", "hosts", "found"),
    [
        ("dp=2", [0, 1], {"dp": 4}),
        ("dp=3", [0, 1, 2], {"dp": 2}),
        ("dp=2,fsdp=2", [0, 0, 1, 1], {"dp": 2, "fsdp": 1, "dpxfsdp": 1}),
        ("dp=2,fsdp=2,tp=2", [0, 1, 2, 3, 4, 5, 6, 7],
         {"dp": 4, "fsdp": 4, "tp": 4, "dpxfsdp": 1, "world": 1, "fsdpxtp": 1}),
    ],
)  # fmt: skip
def test_ranks_of_far_hosts_take_as_many_on_all_ranks(
    ranks: Ranks, layout: str, hosts: list[int], found: dict[str, int]
) -> None:
    for every, most, round_trip, groups in (answers := ranks(len(hosts), along, layout, hosts, 0.0)):
        assert every == found
        assert groups == 1 + sum(found.values()), "no group that nobody uses"
        assert most == max(found.values())
        assert round_trip == answers[0][2] > 0, "the longest of any rank"


def test_near_hosts_take_one(ranks: Ranks) -> None:
    for every, most, _, groups in ranks(2, along, "dp=2", [0, 1], 60.0):
        assert (every, most, groups) == ({"dp": 1}, 1, 2)


def unmeasured(hosts: list[int]) -> float:
    with mock.patch.object(links, "round_trip", side_effect=AssertionError("measured")):
        return along("dp=4", hosts, 0.0)[2]


@pytest.mark.parametrize("hosts", [[], [0, 0, 0, 0], [0, 1, 2, 3]])
def test_nothing_is_measured_where_one_connection_is_taken_anyway(ranks: Ranks, hosts: list[int]) -> None:
    assert ranks(4, unmeasured, hosts) == [0.0] * 4


STEPS = 2


@cache
def one_device() -> Trace:
    return reference(HostileLanguage(steps=STEPS))


def trained(layout: str, hosts: str) -> tuple[Trace, int]:
    """A run in which all but the smallest messages go in parts, and how many did."""
    cut, parts = list[int](), Peers._parts

    def counted(self: Peers, message: Tensor, place: int) -> list[tuple[dist.ProcessGroup, Tensor]]:
        found = list(parts(self, message, place))
        cut.append(len(found) > 1)
        return found

    with (
        mock.patch.dict("os.environ", {"PHALANX_HOSTS": hosts}),
        mock.patch.object(connections, "FAR", 0.0),
        mock.patch.object(peers, "LEAST_PART", 64),
        mock.patch.object(Peers, "_parts", counted),
        mock.patch.object(Communicator, "small_bytes", 64),
        mock.patch.object(bucket, "BUCKET_BYTES", 1000),
    ):
        return spread_run(HostileLanguage(steps=STEPS), Layout.parse(layout)), sum(cut)


@pytest.mark.parametrize(
    ("layout", "hosts"), [("dp=2", "1,1"), ("fsdp=2,zero=3", "1,1"), ("dp=4", "2,2"), ("fsdp=3", "1,1,1")]
)
def test_training_is_that_of_one_device(ranks: Ranks, layout: str, hosts: str) -> None:
    for trace, cut in ranks(Layout.parse(layout).world, trained, layout, hosts):
        assert cut > 10 * STEPS
        error, where = difference(trace, one_device())
        assert error < TOLERANCE, where


def numbers(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank)) * 1e3


def summed(far: float) -> list[Tensor]:
    """Of sizes that are small, odd and large, all under way at once; and what is counted of them."""
    with mock.patch.object(connections, "FAR", far), mock.patch.object(peers, "LEAST_PART", 64):
        mesh = Mesh(Layout(dp=2), dist.get_rank(), PATIENCE, hosts=[0, 1])
        group, every = mesh.group("dp"), [numbers(dist.get_rank(), size) for size in (2, 3, 65, 1001, 300_007)]
        group.small_bytes, calls = 0, group.traffic.calls.copy()
        for each in [group.all_reduce(each) for each in every]:
            each.wait()
        counted = group.traffic.calls - calls
        assert counted == {("dp", "all-reduce"): len(every)}, "each is one collective"
    dist.barrier()
    mesh.close()
    return every


def test_sums_of_two_ranks_have_the_same_bits_near_and_far(ranks: Ranks) -> None:
    near, far = ranks(2, summed, 60.0), ranks(2, summed, 0.0)
    for every in (*near, *far):
        assert all(torch.equal(one, other) for one, other in zip(every, near[0], strict=True))


def told(far: float) -> list[str]:
    with (
        mock.patch.dict("os.environ", {"PHALANX_HOSTS": "1,1"}),
        mock.patch.object(connections, "FAR", far),
        phalanx.Engine(HostileLanguage(steps=1), "dp=2", device="cpu") as engine,
    ):
        for batch in engine.batches():
            engine.step(batch)
        return [note for note in Overview(engine).notes() if "connections" in note]


def test_several_are_said(ranks: Ranks) -> None:
    for notes in ranks(2, told, 0.0):
        assert "ms, so what is large goes to each of their ranks over 4 connections at once" in notes[0]
    assert ranks(2, told, 60.0) == [[], []]


def on_host(rank: int) -> tuple[int, bool, bool]:
    """Of two ranks, each on a host of its own: connections, whether these are far, and whether a sum is right."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    environment = Environment.detect()
    environment.join(torch.device("cpu"), PATIENCE)
    mesh = Mesh(Layout(dp=2), rank, PATIENCE, hosts=environment.hosts)
    own = torch.full((1 << 19,), float(rank + 1))
    mesh.group("dp").all_reduce(own).wait()
    dist.barrier()
    mesh.close()
    environment.leave()
    return mesh.connections, mesh.round_trip >= ROUND_TRIP, bool((own == 3).all())


ROUND_TRIP = 0.02


@needs_namespaces
def test_a_long_round_trip_is_found(tmp_path: Path) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun, of which far links are made")
    with SlowNetwork(2, tmp_path, round_trip=ROUND_TRIP) as network, ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: network.holders[rank].ask(on_host, rank), range(2)))
    assert found == [(4, True, True)] * 2
