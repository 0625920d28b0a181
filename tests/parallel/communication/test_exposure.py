"""What collectives cost a step: waited for, or beside what a rank computes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.launched import Launched
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks


def launched(traffic: Traffic, axis: str = "dp") -> Launched:
    return traffic.launched(f"{axis} of 0", axis, 2, "all-reduce", torch.ones(1), 1)


def test_a_collective_is_beside_what_is_computed_until_it_is_waited_for() -> None:
    traffic = Traffic()
    traffic.exposure.start()
    one = launched(traffic, "dp+fsdp")
    time.sleep(0.05)
    with one:
        time.sleep(0.01)
    found = traffic.exposure.taken()
    assert 0.05 <= found["overlapped_dp_fsdp"] < 0.2
    assert 0.01 <= found["exposed_dp_fsdp"] < 0.05
    traffic.exposure.start()
    assert traffic.exposure.taken() == {}


def test_two_at_once_along_one_axis_count_once() -> None:
    traffic = Traffic()
    traffic.exposure.start()
    began = time.perf_counter()
    first, second, other = launched(traffic, "fsdp"), launched(traffic, "fsdp"), launched(traffic, "tp")
    time.sleep(0.03)
    for one in (first, second, other):
        with one:
            pass
    spent = time.perf_counter() - began
    found = traffic.exposure.taken()
    assert 0.03 <= found["overlapped_fsdp"] <= spent
    assert 0.03 <= found["overlapped_tp"] <= spent


def test_between_steps_and_behind_them_nothing_is_counted() -> None:
    traffic = Traffic()

    def wait() -> None:
        with launched(traffic):
            time.sleep(0.01)

    wait()
    traffic.exposure.start()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert traffic.exposure.taken() == {}
    wait()
    assert traffic.exposure.taken() == {}


def late() -> dict[str, float]:
    """Rank 1 comes late to one, and both compute beside another."""
    traffic = Traffic()
    world = Communicator(dist.group.WORLD, traffic)
    world.all_reduce(torch.ones(1)).wait()
    traffic.exposure.start()
    time.sleep(0.2 * dist.get_rank())
    world.all_reduce(torch.ones(1)).wait()
    pending = world.all_reduce(torch.ones(1))
    time.sleep(0.1)
    pending.wait()
    return {name.rpartition("_default")[0]: seconds for name, seconds in traffic.exposure.taken().items()}


def test_ranks_wait_for_one_that_is_late_and_not_for_what_they_compute_beside(ranks: Ranks) -> None:
    first, second = ranks(2, late)
    assert first["exposed"] > 0.1 > second["exposed"]
    assert min(first["overlapped"], second["overlapped"]) > 0.05


@pytest.mark.gpu
def test_a_gpus_clock_is_read_when_it_is_there() -> None:
    traffic = Traffic()
    traffic.exposure.start()
    one = traffic.launched("a", "dp", 2, "all-reduce", torch.ones(1, device="cuda"), 1)
    torch.cuda._sleep(1_000_000_000)
    with one:
        torch.cuda._sleep(500_000_000)
    assert "exposed_dp" not in traffic.exposure.taken()
    torch.cuda.synchronize()
    traffic.exposure.start()
    found = traffic.exposure.taken()
    assert found["overlapped_dp"] > found["exposed_dp"] > 0.05
