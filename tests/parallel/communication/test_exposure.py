"""What collectives cost a step: waited for, or beside what a rank computes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.exposure import Exposure
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks


class Work:
    """One that is over when it is told to be."""

    over = False

    def is_completed(self) -> bool:
        return self.over


def test_a_collective_that_is_over_before_it_is_waited_for_overlaps_until_then() -> None:
    exposure, work = Exposure(), Work()
    exposure.start()
    one = exposure.launched("dp", cuda=False)
    one.works = [work]  # type: ignore[list-item]
    time.sleep(0.02)
    work.over = True
    exposure.look()
    time.sleep(0.05)
    exposure.waits(one)
    time.sleep(0.01)
    exposure.waited(one)
    found = exposure.taken()
    assert 0.02 <= found["overlapped_dp"] < 0.05
    assert 0.01 <= found["exposed_dp"] < 0.04
    assert exposure.taken() == {}


def test_two_at_once_along_one_axis_count_once() -> None:
    exposure = Exposure()
    exposure.start()
    began = time.perf_counter()
    first, second = exposure.launched("fsdp", cuda=False), exposure.launched("fsdp", cuda=False)
    other = exposure.launched("tp", cuda=False)
    time.sleep(0.03)
    for one in (first, second, other):
        exposure.waits(one)
        exposure.waited(one)
    spent = time.perf_counter() - began
    found = exposure.taken()
    assert 0.03 <= found["overlapped_fsdp"] <= spent
    assert 0.03 <= found["overlapped_tp"] <= spent


def test_between_steps_and_behind_them_nothing_is_counted() -> None:
    exposure = Exposure()
    assert not exposure.launched("dp", cuda=False).axis
    exposure.start()
    found = []
    thread = threading.Thread(target=lambda: found.append(exposure.launched("dp", cuda=False)))
    thread.start()
    thread.join()
    exposure.waits(found[0])
    exposure.waited(found[0])
    assert exposure.taken() == {}


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
    exposure = Exposure()
    exposure.start()
    one = exposure.launched("dp", cuda=True)
    torch.cuda._sleep(1_000_000_000)
    exposure.waits(one)
    torch.cuda._sleep(500_000_000)
    exposure.waited(one)
    assert exposure.taken() == {}
    torch.cuda.synchronize()
    found = exposure.taken()
    assert found["overlapped_dp"] > found["exposed_dp"] > 0.05
