"""Training with collectives inside of hosts first is that of one device, and of ranks that know of no hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from unittest import mock

import pytest
import torch.distributed as dist

import phalanx
from phalanx import Layout
from phalanx.parallel.communication import connections
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.host_sums import HostSums
from phalanx.parallel.weights import bucket
from phalanx.train.overview import Overview
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks

STEPS = 3
SUMS, SHARDS = ("all_reduce",), ("prepared_all_gather", "reduce_scatter")
ALL = (*SUMS, *SHARDS)


@cache
def one_device() -> Trace:
    return reference(HostileLanguage(steps=STEPS))


def trained(layout: str, hosts: str) -> tuple[Trace, Counter[str]]:
    """A run with small buckets that all take the long way, and how many did."""
    taken = Counter[str]()

    def counted(name: str) -> Callable[..., object]:
        whole = getattr(HostSums, name)

        def call(self: HostSums, *given: object) -> object:
            taken[name] += 1
            return whole(self, *given)

        return call

    with (
        mock.patch.dict("os.environ", {"PHALANX_HOSTS": hosts}),
        mock.patch.multiple(HostSums, **{name: counted(name) for name in ALL}),
        mock.patch.object(Communicator, "small_bytes", 64),
        mock.patch.object(bucket, "BUCKET_BYTES", 1000),
    ):
        return spread_run(HostileLanguage(steps=STEPS), Layout.parse(layout)), taken


@pytest.mark.parametrize(
    ("layout", "hosts", "ways"),
    [
        ("dp=4", "2,2", SUMS), ("dp=6", "3,3", SUMS), ("dp=4,tp=2", "4,4", SUMS), ("dp=4,fsdp=2,zero=2", "4,4", SUMS),
        ("fsdp=4,zero=1", "2,2", SHARDS), ("fsdp=4,zero=2", "2,2", SHARDS), ("fsdp=6,zero=3", "3,3", SHARDS),
        ("fsdp=4,zero=3,micro_batch=3", "2,2", SHARDS), ("fsdp=4,zero=2,micro_batch=3", "2,2", SHARDS),
        ("dp=2,fsdp=4,zero=3", "2,2,2,2", SHARDS), ("dp=2,fsdp=2,zero=3", "2,2", ()),
    ],
)  # fmt: skip
def test_training_is_that_of_one_device(ranks: Ranks, layout: str, hosts: str, ways: Sequence[str]) -> None:
    for trace, taken in ranks(Layout.parse(layout).world, trained, layout, hosts):
        assert all(taken[way] > STEPS for way in ways)
        assert ways or not any(taken[way] for way in SHARDS), "they lie inside of a host"
        error, where = difference(trace, one_device())
        assert error < TOLERANCE, where


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=4,zero=3,exact=4",
        "fsdp=4,zero=2,exact=4",
        "fsdp=4,zero=3,comm=int4",
        "dp=4,comm=int4",
        "dp=4,comm=topk:10",
    ],
)
def test_training_has_the_bits_of_ranks_that_know_of_no_hosts(ranks: Ranks, layout: str) -> None:
    plain, found = (ranks(4, trained, layout, hosts) for hosts in ("4", "2,2"))
    for (expected, straight), (trace, taken) in zip(plain, found, strict=True):
        assert not straight
        assert taken["prepared_all_gather"] > STEPS
        assert trace.losses == expected.losses
        assert difference(trace, expected)[0] == 0
        assert "comm" in layout or difference(trace, one_device())[0] < TOLERANCE


def told(hosts: Sequence[str], axis: str = "dp") -> list[str]:
    rank = dist.get_rank()
    with (
        mock.patch.dict("os.environ", {"PHALANX_HOSTS": hosts[rank]}),
        mock.patch.object(connections, "FAR", 60.0),  # however busy the machine is
        phalanx.Engine(HostileLanguage(steps=1), f"{axis}={len(hosts)}", device="cpu") as engine,
    ):
        for batch in engine.batches():
            engine.step(batch)
        return [note for note in Overview(engine).notes() if "host" in note]


def test_what_keeps_ranks_from_it_is_said(ranks: Ranks) -> None:
    assert ranks(4, told, ["2,2"] * 4) == [[]] * 4
    for notes in ranks(3, told, ["2,1"] * 3):
        assert "dp=3 has 2, 1 ranks on 2 hosts" in notes[0]
    for notes in ranks(3, told, ["2,1"] * 3, "fsdp"):
        assert "fsdp=3 has 2, 1 ranks on 2 hosts" in notes[0]
    for notes in ranks(4, told, ["2,2", "2,2", "3,1", "3,1"]):
        assert "told in different ways which of them share a host" in notes[0]
